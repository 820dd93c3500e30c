"""An HTML report on the kernels of a bundle."""

load("//rules/private:providers.bzl", "NeuronBundleInfo")

def _folder(log):
    return log.dirname

def _neuron_kernel_report_impl(ctx):
    bundle = ctx.attr.bundle[NeuronBundleInfo]
    stem = bundle.name + ".report" if ctx.label.name == bundle.name + ".report" else ctx.label.name
    page, numbers, table = [ctx.actions.declare_file(stem + suffix) for suffix in (".html", ".json", ".csv")]
    kernels = ctx.actions.declare_directory(stem + ".kernels")
    args = ctx.actions.args()
    args.add("report")
    args.add_all([bundle.tree], expand_directories = False)
    args.add(page, format = "--output=%s")
    if ctx.file.model:
        args.add(ctx.file.model, format = "--model=%s")
    args.add_all(ctx.files.measured, format_each = "--measured=%s")
    args.add_all(bundle.logs, map_each = _folder, format_each = "--logs=%s", uniquify = True)
    ctx.actions.run(
        executable = ctx.executable._kernelgen,
        arguments = [args],
        # A user's cache is not an input, so the report must not contain data from it.
        env = {"NEURON_KERNELGEN_CACHE": ".no-cache", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},
        inputs = depset([bundle.tree] + ctx.files.model + ctx.files.measured, transitive = [bundle.logs]),
        mnemonic = "NeuronReport",
        outputs = [page, numbers, table, kernels],
        progress_message = "Writing a page about " + bundle.name,
        toolchain = None,
    )
    return [DefaultInfo(files = depset([page, numbers, table, kernels]))]

neuron_kernel_report = rule(
    doc = """Writes an HTML report on a bundle's kernels, the same numbers as JSON and CSV, and a folder with a page for each kernel (docs/reference/report.md).

Each bundle has one, `<name>.report`. A target of your own adds what a call takes, or measured times.""",
    implementation = _neuron_kernel_report_impl,
    attrs = {
        "bundle": attr.label(mandatory = True, providers = [NeuronBundleInfo], doc = "The `neuron_kernel_bundle` that the report is about."),
        "measured": attr.label_list(allow_files = True, doc = "Measured times, in the files that `kernelgen report --measured` reads."),
        "model": attr.label(allow_single_file = True, doc = "An export of the model's graphs, from which the report counts launches (docs/reference/models.md)."),
        "_kernelgen": attr.label(default = "//tools/kernelgen", cfg = "exec", executable = True),
    },
)
