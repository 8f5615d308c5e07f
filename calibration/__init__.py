"""From measurements to cost profiles, and from profiles to their errors.

It may import `simulator`, `conformance`, `gpu_backend` and `twin`. `engine_steps/` measures our own
engine; `server_logs/` fits to a server's log; `measured/` compares with published runs. Start with
`commands.py`.
"""
