"""The command `headway`: a file for each verb.

It may import everything; only calibration's verbs import it. Start with `main.py`; what happens on
Ctrl-C is in `console.py`.
"""
