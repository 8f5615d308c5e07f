"""Models small enough to be computed by hand, one of each family that the engine runs."""

from dataclasses import replace

from simulator.models.spec import ModelSpec, RopeScaling

QWEN = ModelSpec("q", 2, 64, 4, 2, 32, 96, 500, True, qk_norm=True, max_position_embeddings=512)
LLAMA = replace(
    QWEN,
    name="l",
    tie_word_embeddings=False,
    attention_bias=True,
    qk_norm=False,
    rope_theta=500.0,
    rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64),
)
