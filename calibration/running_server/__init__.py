"""From a running vLLM server to its scenario and cost profile: `headway calibrate --server`.

`calibrate.py` is the course of it; `ask.py` asks the server what it is, `drive.py` sends it loads,
`fit.py` fits a cost to them and judges it, `page.py` tells of it. They may import all but `tools`.
"""
