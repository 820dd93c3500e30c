"""The rules, for BUILD files: `load("@neuron_kernelgen//rules:defs.bzl", …)`.

Most users write none of these by hand: `neuron.kernels(...)` in MODULE.bazel makes them from a manifest. To write
kernels by hand, declare the three steps as targets:

    neuron_hlo(
        name = "my_norm.hlo",
        emitters = {"//my_kernels:norm.py": "my_kernels"},
        inputs = ["(64,1,1,1)/f32"],
        op = "rms_norm",
        output = "(64,1,1,1)/f32",
        params = {"eps": "1e-05"},
    )

    neuron_neff(
        name = "my_norm.trn1.neff",
        hlo = ":my_norm.hlo",
        target = "trn1",
    )

    neuron_kernel_bundle(
        name = "mine_trn1",
        manifest = "mine",
        neffs = [":my_norm.trn1.neff"],
    )
"""

load("//rules/private:providers.bzl", _NeuronBundleInfo = "NeuronBundleInfo", _NeuronHloInfo = "NeuronHloInfo", _NeuronNeffInfo = "NeuronNeffInfo", _NeuronToolchainInfo = "NeuronToolchainInfo")
load("//rules/private:targets.bzl", _TARGETS = "TARGETS")
load("//rules/private/rules:neuron_bundle_cc.bzl", "neuron_bundle_cc")
load("//rules/private/rules:neuron_hlo.bzl", _neuron_hlo = "neuron_hlo")
load("//rules/private/rules:neuron_kernel_bundle.bzl", "neuron_kernel_bundle_rule")
load("//rules/private/rules:neuron_kernel_report.bzl", _neuron_kernel_report = "neuron_kernel_report")
load("//rules/private/rules:neuron_native_kernel.bzl", _neuron_native_kernel = "neuron_native_kernel")
load("//rules/private/rules:neuron_neff.bzl", _neuron_neff = "neuron_neff")
load("//rules/private/rules:neuron_toolchain.bzl", _neuron_toolchain = "neuron_toolchain")

NeuronBundleInfo = _NeuronBundleInfo
NeuronHloInfo = _NeuronHloInfo
NeuronNeffInfo = _NeuronNeffInfo
NeuronToolchainInfo = _NeuronToolchainInfo

neuron_hlo = _neuron_hlo
neuron_kernel_report = _neuron_kernel_report
neuron_native_kernel = _neuron_native_kernel
neuron_neff = _neuron_neff
neuron_toolchain = _neuron_toolchain

# The documented values of neuronx-cc's `--target`. `kernelgen model` writes these if the user names no target.
NEURON_TARGETS = [name for name, target in _TARGETS.items() if not target.experimental]

# The suffixes of a bundle's name for its forms, which equal CMake's FORM.
BUNDLE_FORMS = ["", ".embed", ".pack", ".tree"]

def neuron_kernel_bundle(name, visibility = None, tags = [], **kwargs):
    """A bundle and its forms.

    Args:
        name: the bundle; building it makes the pack. `<name>.embed` is a C++ library with the kernels embedded, `<name>.pack` the pack
            alone, `<name>.tree` a folder with every HLO and NEFF as a file, and `<name>.report` an HTML report on the kernels.
        visibility: the visibility of all these targets.
        tags: the tags of all these targets.
        **kwargs: the rule's other attributes.
    """
    neuron_kernel_bundle_rule(name = name, tags = tags, visibility = visibility, **kwargs)
    neuron_bundle_cc(name = name + ".embed", bundle = name, tags = tags, visibility = visibility)
    neuron_kernel_report(name = name + ".report", bundle = name, tags = tags + ["manual"], visibility = visibility)
    for form in ["pack", "tree"]:
        native.filegroup(name = "{}.{}".format(name, form), srcs = [name], output_group = form, tags = tags, visibility = visibility)

def neuron_bundle_aliases(name, bundles, visibility = None, tags = []):
    """Declares aliases of another package's bundles, in all their forms.

    Args:
        name: the manifest's name; bundles are `<name>_<target>`.
        bundles: the label of each bundle, by target.
        visibility: the visibility of all these targets.
        tags: the tags of all these targets.
    """
    for target, label in bundles.items():
        for form in BUNDLE_FORMS:
            native.alias(name = "{}_{}{}".format(name, target, form), actual = label + form, tags = tags, visibility = visibility)
        native.alias(
            name = "{}_{}.report".format(name, target),
            actual = label + ".report",
            tags = tags + ["manual"],
            visibility = visibility,
        )
