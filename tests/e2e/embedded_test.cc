// Tests a bundle that is linked into the program: it has every kernel of the plan, and no other.
//
//     embedded_test LOOKUPS
//
// BUNDLE_HEADER and BUNDLE, which the build defines, name the bundle: "neuron_kernels/llama3_trn1.h" and
// neuron_kernels_llama3_trn1.

#include "backend/bundle/tests/check.h"
#include "backend/bundle/tests/lookups.h"
#include "neuron_kernels.h"

#include BUNDLE_HEADER

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s LOOKUPS\n", argv[0]);
        return 2;
    }
    char             message[NEURON_KERNELS_MESSAGE_SIZE];
    neuron_kernels * bundle;
    if (neuron_kernels_open_embedded(&BUNDLE, &bundle, message, sizeof(message)) != NEURON_KERNELS_OK) {
        fprintf(stderr, "%s\n", message);
        return 1;
    }
    test::check_bundle(bundle, test::read_lookups(argv[1]));
    printf("%s for %s: %zu kernels, %zu NEFFs\n", neuron_kernels_metadata(bundle, "name"),
           neuron_kernels_metadata(bundle, "target"), neuron_kernels_count(bundle), neuron_kernels_neff_count(bundle));
    neuron_kernels_close(bundle);
    return test_result();
}
