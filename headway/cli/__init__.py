"""The command `headway`: a file for each verb.

It may import all of `simulator`; the verbs of packages above import it. Start with `main.py`; what
happens on Ctrl-C is in `console.py`.
"""
