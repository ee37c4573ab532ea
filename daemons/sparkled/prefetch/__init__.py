"""The prefetch daemon: reads expert records from SSD into the slots of the shared pool, and decides who stays.

Owns    the pool's shared memory (control segment and regions), the policy, the reads under way
Reads   expert files of the store, clients' event rings and lock files
Sends   PoolAttached, ExpertsReady, Error
Never   interprets weights, blocks on a client, reuses a slot that a client holds, publishes a record it has not checked
"""
