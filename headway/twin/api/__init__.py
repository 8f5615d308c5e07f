"""What clients say to a vLLM server, and what it answers: bodies, prompts, texts and streams.

Start with `generate.py`, which takes a request from its body to its answer; `openai.py` reads
bodies, `answers.py` writes answers, `messages.py` does both in Anthropic's words.
"""
