#include "neuron_kernels.h"

#include <cstdio>

int main(int argc, char ** argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: %s PACK\n", argv[0]);
        return 2;
    }
    char             message[NEURON_KERNELS_MESSAGE_SIZE];
    neuron_kernels * bundle;
    if (neuron_kernels_open_file(argv[1], &bundle, message, sizeof(message)) != NEURON_KERNELS_OK) {
        std::fprintf(stderr, "%s\n", message);
        return 1;
    }
    std::printf("%s for %s, made by %s\n", neuron_kernels_metadata(bundle, "name"),
                neuron_kernels_metadata(bundle, "target"), neuron_kernels_metadata(bundle, "compiler"));
    for (size_t i = 0; i < neuron_kernels_count(bundle); i++) {
        std::printf("%s\n", neuron_kernels_id(bundle, static_cast<int32_t>(i)));
    }

    // add of two F32 tensors of 4096 by 512 elements; 0 is GGML_TYPE_F32
    neuron_kernels_tensor inputs[2] = {
        { 0, { 4096, 512, 1, 1 }, {} },
        { 0, { 4096, 512, 1, 1 }, {} },
    };
    neuron_kernels_set_dense(&inputs[0]);
    neuron_kernels_set_dense(&inputs[1]);
    const neuron_kernels_tensor output = inputs[0];
    const int32_t kernel = neuron_kernels_find(bundle, "ADD", nullptr, inputs, 2, &output, NEURON_KERNELS_NO_ALIAS);
    if (kernel != NEURON_KERNELS_NOT_FOUND) {
        size_t       size;
        const void * neff = neuron_kernels_neff(bundle, kernel, &size);
        std::printf("found %s: %zu bytes at %p\n", neuron_kernels_id(bundle, kernel), size, neff);
    }
    neuron_kernels_close(bundle);
    return 0;
}
