"""The command `headway`: a file for each verb.

It may import everything; nothing imports it. Start with `main.py`.
"""
