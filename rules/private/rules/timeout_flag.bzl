"""The build setting that limits the time to emit one kernel."""

TimeoutFlagInfo = provider(doc = "A time limit.", fields = {"seconds": "int: the limit, 0 for none."})

def _timeout_flag_impl(ctx):
    if ctx.build_setting_value < 0:
        fail("--{}={}: expected a number of seconds, 0 for no limit".format(ctx.label, ctx.build_setting_value))
    return TimeoutFlagInfo(seconds = ctx.build_setting_value)

timeout_flag = rule(
    doc = "Seconds that one kernel's emitter may run; 0 means no limit.",
    implementation = _timeout_flag_impl,
    build_setting = config.int(flag = True),
)
