// Opens the bundle that is linked in. Finds kernelgen's kernel by the op and tensors, and this repository's own kernel
// by its id and by its name.

#include "neuron_kernels.h"
#include "neuron_kernels/tiny_trn1.h"

#include <cstdio>
#include <cstring>

static int fail(const char * what) {
    fprintf(stderr, "%s\n", what);
    return 1;
}

int main() {
    char             message[NEURON_KERNELS_MESSAGE_SIZE];
    neuron_kernels * bundle;
    if (neuron_kernels_open_embedded(&neuron_kernels_tiny_trn1, &bundle, message, sizeof(message)) !=
        NEURON_KERNELS_OK) {
        return fail(message);
    }
    if (neuron_kernels_count(bundle) != 3) {
        return fail("the manifest has three kernels");
    }

    const int32_t         f32       = 0;
    neuron_kernels_tensor inputs[2] = {
        { f32, { 64, 4, 1, 1 }, {} },
        { f32, { 64, 1, 1, 1 }, {} },
    };
    for (neuron_kernels_tensor & input : inputs) {
        if (neuron_kernels_set_dense(&input) != 0) {
            return fail("strides of an f32 tensor");
        }
    }
    neuron_kernels_tensor output = inputs[0];
    const int32_t add = neuron_kernels_find(bundle, "ADD", nullptr, inputs, 2, &output, NEURON_KERNELS_NO_ALIAS);
    if (add == NEURON_KERNELS_NOT_FOUND) {
        return fail("ADD is not found");
    }
    if (neuron_kernels_find(bundle, "MUL", nullptr, inputs, 2, &output, NEURON_KERNELS_NO_ALIAS) !=
        NEURON_KERNELS_NOT_FOUND) {
        return fail("MUL is found, and the manifest has none");
    }
    bool own = false;
    for (int32_t i = 0; i < 3; i++) {
        size_t       size = 0;
        const void * neff = neuron_kernels_neff(bundle, i, &size);
        if (neff == nullptr || size <= 1024) {
            return fail("a kernel has no NEFF");
        }
        own = own || strncmp(neuron_kernels_id(bundle, i), "squared_relu-", 13) == 0;
    }
    const int32_t named = neuron_kernels_find_name(bundle, "running_sum");
    own                 = own && named != NEURON_KERNELS_NOT_FOUND &&
                          strncmp(neuron_kernels_id(bundle, named), "running_sum-", 12) == 0 &&
                          neuron_kernels_find_name(bundle, "sum") == NEURON_KERNELS_NOT_FOUND;
    neuron_kernels_close(bundle);
    return own ? 0 : fail("a kernel of this repository is missing");
}
