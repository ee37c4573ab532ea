"""The compute daemon: runs the model. The only package that imports mlx.

Owns    the model's resident weights, KV caches and recurrent state, the requests under way
Reads   resident.safetensors and config files of the store, experts in the shared pool
Sends   Accepted, Progress, Tokens, Finished, Error; to prefetch AttachPool, FetchExperts, CancelFetch, DetachPool
Never   sees text, writes to the pool, computes with an expert it does not hold
"""
