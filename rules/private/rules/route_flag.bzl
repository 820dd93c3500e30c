"""The build setting that adds execution properties to compiles."""

route_flag = rule(
    doc = "Whether compiles have execution properties for the compiler and the target. Off by default: a cluster refuses properties that it does not define.",
    implementation = lambda ctx: [],
    build_setting = config.bool(flag = True),
)
