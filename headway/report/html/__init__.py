"""One HTML file about one run, or several side by side.

It may import `figures`, `report` and what lies below. Start with `page.py`.
"""
