# %% [markdown]
# # Two objectives from Python
#
# A larger batch gives more tokens per second, and each request waits longer. Which batches are worth considering?

# %%
import time

import sweeper


# %%
def infer(batch: int, width: int = 512, tokens: int = 16) -> dict[str, object]:
    """Pass `batch` requests through two layers at once, and return the times and the tokens of a pass."""
    import numpy as np

    generator = np.random.default_rng(0)
    requests = generator.standard_normal((batch * tokens, width), np.float32)
    up = generator.standard_normal((width, 4 * width), np.float32)
    down = generator.standard_normal((4 * width, width), np.float32)
    times_s = []
    for _ in range(20):
        started_s = time.perf_counter()
        np.maximum(requests @ up, 0) @ down
        times_s.append(time.perf_counter() - started_s)
    return {"step_times_s": times_s[5:], "tokens_per_step": batch * tokens, "statistic": "median"}


# %% [markdown]
# The sweep is a process of its own. Sweeper derives both metrics from the times and the tokens.

# %%
result = sweeper.run(
    infer,
    "name=inference",
    "hardware=cpu",
    "search=grid",
    "objective=[tokens_per_s,step_time_ms]",
    "finals.rounds=3",
    space={"batch": [1, 4, 16, 64]},
)

# %% [markdown]
# The front: no other batch is at least as good in both objectives and better in one. The finals measure its points
# again, and a notebook draws them. Intervals are wide on a busy machine, such as the one that ran this notebook.

# %%
result

# %% [markdown]
# Each table is a DataFrame too.

# %%
print(result.front[["param.batch", "tokens_per_s", "step_time_ms"]])
