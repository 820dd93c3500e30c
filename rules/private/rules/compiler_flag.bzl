"""The build setting that chooses the compiler."""

CHOICES = ["auto", "neuronx-cc", "simulator"]

CompilerFlagInfo = provider(doc = "The chosen compiler.", fields = {"value": "string: one of CHOICES."})

def _compiler_flag_impl(ctx):
    value = ctx.build_setting_value
    if value not in CHOICES:
        fail("--{}={}: unknown compiler; it is one of {}".format(ctx.label, value, ", ".join(CHOICES)))
    return CompilerFlagInfo(value = value)

compiler_flag = rule(
    doc = "`auto` takes neuronx-cc where it is installed and the simulator elsewhere.",
    implementation = _compiler_flag_impl,
    build_setting = config.string(flag = True),
)
