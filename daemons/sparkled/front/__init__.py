"""The front daemon: conversations in text on one side, token ids on the other.

Owns   the sessions, the tokenizer and chat template of the store, and every answer under way (`answer`).
Reads  Chat, Cancel, SessionRequest and CloseSession of clients; Accepted, Progress, Tokens and Finished of compute;
       of the store only the manifest and the tokenizer's files.
Sends  Generate and Cancel to compute; Accepted, Progress, Text and exactly one ChatDone or Error per Chat to clients.
Never  loads weights or imports mlx, lets what a user typed become a control token, or blocks its loop.
"""
