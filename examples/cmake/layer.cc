// Prints the kernels that are linked into this program, and finds one of them.

#include <neuron_kernels/layer_inf2.h>
#include <neuron_kernels/layer_trn1.h>

#include <cstdio>

int main() {
    const neuron_kernels_table * tables[] = { &neuron_kernels_layer_trn1, &neuron_kernels_layer_inf2 };
    for (const neuron_kernels_table * table : tables) {
        char             message[NEURON_KERNELS_MESSAGE_SIZE];
        neuron_kernels * bundle;
        if (neuron_kernels_open_embedded(table, &bundle, message, sizeof(message)) != NEURON_KERNELS_OK) {
            std::fprintf(stderr, "%s\n", message);
            return 1;
        }
        std::printf("%s for %s: %zu kernels\n", neuron_kernels_metadata(bundle, "name"),
                    neuron_kernels_metadata(bundle, "target"), neuron_kernels_count(bundle));

        // 512 rows of F16 weights times eight rows of F32 values; the numbers are ggml's types
        neuron_kernels_tensor inputs[2] = {
            { 1, { 256, 512, 1, 1 }, {} },
            { 0, { 256, 8, 1, 1 },   {} },
        };
        neuron_kernels_tensor output = inputs[1];
        output.ne[0]                 = 512;
        neuron_kernels_set_dense(&inputs[0]);
        neuron_kernels_set_dense(&inputs[1]);
        neuron_kernels_set_dense(&output);
        const int32_t kernel =
            neuron_kernels_find(bundle, "MUL_MAT", nullptr, inputs, 2, &output, NEURON_KERNELS_NO_ALIAS);
        if (kernel == NEURON_KERNELS_NOT_FOUND) {
            std::fprintf(stderr, "there is no kernel for it\n");
            return 1;
        }
        std::printf("found %s\n", neuron_kernels_id(bundle, kernel));
        neuron_kernels_close(bundle);
    }
    return 0;
}
