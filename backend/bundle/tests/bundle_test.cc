// Compares a pack that kernelgen wrote with the table of its expected contents.
//
//     bundle_test PACK LOOKUPS

#include "check.h"
#include "lookups.h"
#include "neuron_kernels.h"

int main(int argc, char ** argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s PACK LOOKUPS\n", argv[0]);
        return 2;
    }
    char             message[NEURON_KERNELS_MESSAGE_SIZE];
    neuron_kernels * bundle;
    if (neuron_kernels_open_file(argv[1], &bundle, message, sizeof(message)) != NEURON_KERNELS_OK) {
        fprintf(stderr, "%s\n", message);
        return 1;
    }
    test::check_bundle(bundle, test::read_lookups(argv[2]));
    printf("%s for %s: %zu kernels, %zu NEFFs\n", neuron_kernels_metadata(bundle, "name"),
           neuron_kernels_metadata(bundle, "target"), neuron_kernels_count(bundle), neuron_kernels_neff_count(bundle));
    neuron_kernels_close(bundle);
    return test_result();
}
