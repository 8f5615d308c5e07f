"""From a YAML file to a scenario: what a file may say, what is wrong with it, what it describes.

It may import `build` and what lies below. Start with `scenario.py`: what a file may say
(`*_config.py`, one block each), then `load.py`: what may be wrong with it. `resolve.py` has what
its engines are, `draw.py` its requests.
"""
