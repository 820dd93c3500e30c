"""The resources that one compile needs, for Bazel's local scheduler.

`resource_set` accepts a top-level function of the machine and the number of inputs, but no closure. So requests are rounded up
to steps, with one function for each.
"""

def _gb1_cpu1(_os, _inputs):
    return {"cpu": 1, "memory": 1024}

def _gb4_cpu1(_os, _inputs):
    return {"cpu": 1, "memory": 4096}

def _gb8_cpu1(_os, _inputs):
    return {"cpu": 1, "memory": 8192}

def _gb32_cpu1(_os, _inputs):
    return {"cpu": 1, "memory": 32768}

def _gb128_cpu1(_os, _inputs):
    return {"cpu": 1, "memory": 131072}

def _gb1_cpu4(_os, _inputs):
    return {"cpu": 4, "memory": 1024}

def _gb4_cpu4(_os, _inputs):
    return {"cpu": 4, "memory": 4096}

def _gb8_cpu4(_os, _inputs):
    return {"cpu": 4, "memory": 8192}

def _gb32_cpu4(_os, _inputs):
    return {"cpu": 4, "memory": 32768}

def _gb128_cpu4(_os, _inputs):
    return {"cpu": 4, "memory": 131072}

def _gb1_cpu16(_os, _inputs):
    return {"cpu": 16, "memory": 1024}

def _gb4_cpu16(_os, _inputs):
    return {"cpu": 16, "memory": 4096}

def _gb8_cpu16(_os, _inputs):
    return {"cpu": 16, "memory": 8192}

def _gb32_cpu16(_os, _inputs):
    return {"cpu": 16, "memory": 32768}

def _gb128_cpu16(_os, _inputs):
    return {"cpu": 16, "memory": 131072}

# By CPUs, then by memory in MiB.
_STEPS = [
    (1, [
        (1024, _gb1_cpu1),
        (4096, _gb4_cpu1),
        (8192, _gb8_cpu1),
        (32768, _gb32_cpu1),
        (131072, _gb128_cpu1),
    ]),
    (4, [
        (1024, _gb1_cpu4),
        (4096, _gb4_cpu4),
        (8192, _gb8_cpu4),
        (32768, _gb32_cpu4),
        (131072, _gb128_cpu4),
    ]),
    (16, [
        (1024, _gb1_cpu16),
        (4096, _gb4_cpu16),
        (8192, _gb8_cpu16),
        (32768, _gb32_cpu16),
        (131072, _gb128_cpu16),
    ]),
]

def resource_set(memory_mb, cpus):
    """Returns the function of the next larger step for `ctx.actions.run(resource_set = …)`.

    Args:
        memory_mb: memory of one action in MiB; more than the largest step counts as the largest step.
        cpus: CPUs of one action, with the same limit.

    Returns:
        a function of the operating system and the number of inputs.
    """
    functions = ([f for step, f in _STEPS if cpus <= step] or [_STEPS[-1][1]])[0]
    return ([f for step, f in functions if memory_mb <= step] or [functions[-1][1]])[0]
