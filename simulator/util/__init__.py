"""Tools that know nothing of engines: YAML with lines, files that appear whole, CSV, workers.

It may import no other package. Start with `errors.py`: all that goes wrong on the user's side is
one.
"""
