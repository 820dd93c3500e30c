"""What one compile needs of the build machine, for Bazel's local scheduler.

`resource_set` takes a top-level function of the machine and the number of inputs, and no closure; so requests are rounded up to the
steps below, each a function of its own.
"""

def _gb1(_os, _inputs):
    return {"cpu": 1, "memory": 1024}

def _gb2(_os, _inputs):
    return {"cpu": 1, "memory": 2048}

def _gb4(_os, _inputs):
    return {"cpu": 1, "memory": 4096}

def _gb8(_os, _inputs):
    return {"cpu": 1, "memory": 8192}

def _gb16(_os, _inputs):
    return {"cpu": 1, "memory": 16384}

def _gb32(_os, _inputs):
    return {"cpu": 1, "memory": 32768}

def _gb64(_os, _inputs):
    return {"cpu": 1, "memory": 65536}

def _gb1_cpu4(_os, _inputs):
    return {"cpu": 4, "memory": 1024}

def _gb2_cpu4(_os, _inputs):
    return {"cpu": 4, "memory": 2048}

def _gb4_cpu4(_os, _inputs):
    return {"cpu": 4, "memory": 4096}

def _gb8_cpu4(_os, _inputs):
    return {"cpu": 4, "memory": 8192}

def _gb16_cpu4(_os, _inputs):
    return {"cpu": 4, "memory": 16384}

def _gb32_cpu4(_os, _inputs):
    return {"cpu": 4, "memory": 32768}

def _gb64_cpu4(_os, _inputs):
    return {"cpu": 4, "memory": 65536}

_STEPS = [
    (1024, _gb1, _gb1_cpu4),
    (2048, _gb2, _gb2_cpu4),
    (4096, _gb4, _gb4_cpu4),
    (8192, _gb8, _gb8_cpu4),
    (16384, _gb16, _gb16_cpu4),
    (32768, _gb32, _gb32_cpu4),
    (65536, _gb64, _gb64_cpu4),
]

def resource_set(memory_mb, cpus):
    """Finds the function for `ctx.actions.run(resource_set = …)` of the next larger step.

    Args:
        memory_mb: memory of one action in MiB; beyond the largest step it counts as the largest.
        cpus: CPUs of one action; more than one counts as four.

    Returns:
        a function of the operating system and the number of inputs.
    """
    for memory, one, four in _STEPS:
        if memory_mb <= memory:
            return one if cpus <= 1 else four
    return _STEPS[-1][1 if cpus <= 1 else 2]
