"""The build setting that names compilers and targets to a cluster."""

route_flag = rule(
    doc = "Whether compiles carry execution properties. A cluster that knows no such properties would refuse them, so it is asked for.",
    implementation = lambda ctx: [],
    build_setting = config.bool(flag = True),
)
