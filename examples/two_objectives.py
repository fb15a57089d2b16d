# %% [markdown]
# # Two objectives from Python
#
# A larger batch gives more tokens per second, but each request waits longer. Which batch sizes are worth considering?

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
# The sweep runs in its own process. Sweeper derives both metrics from the times and the tokens.

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
# On the Pareto front, no other batch size is at least as good in both objectives and better in one. The finals measure
# these points again, and the notebook plots them. Intervals are wide on a busy machine, like the one that ran this.

# %%
result

# %% [markdown]
# Each table is also a DataFrame.

# %%
print(result.front[["param.batch", "tokens_per_s", "step_time_ms"]])
