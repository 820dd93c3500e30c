// Scenarios for the backend's tests: each uses the first NeuronCore and prints whether the result is correct.
//
//     scenarios <libggml-neuron.so> <folder with ggml's CPU backend> <scenario>...
//
// Scenarios with "two-cores" in their names need a second NeuronCore.
//
// The scenarios do not depend on which kernels there are: tests/ggml_neuron runs them once to record the kernels that
// they need, builds those, and runs the scenarios again, in many configurations. Results are compared with the CPU's.
//
// The output is one line per scenario, "<scenario>: ok" or "<scenario>: <the mistake>". A node without a kernel is also
// a mistake.

#include "ggml-backend.h"
#include "ggml.h"
#include "scenario.h"

#include <cstdio>
#include <stdexcept>

int main(int argc, char ** argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: scenarios <libggml-neuron.so> <folder with ggml's CPU backend> <scenario>...\n");
        return 2;
    }
    scenario_table scenarios;
    for (const auto & table :
         { graphs_scenarios, device_scenarios, lacking_scenarios, scheduled_scenarios, threads_scenarios,
           failures_scenarios, in_flight_scenarios, two_cores_scenarios, weights_scenarios, tokens_scenarios }) {
        scenarios.merge(table());
    }

    ggml_backend_load_all_from_path(argv[2]);
    cpu     = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    neurons = ggml_backend_load(argv[1]);
    if (!neurons || !cpu) {
        fprintf(stderr, "scenarios: a backend does not load\n");
        return 2;
    }
    if (ggml_backend_reg_dev_count(neurons) == 0) {
        printf("no devices\n");
        return 3;
    }
    neuron     = ggml_backend_reg_dev_get(neurons, 0);
    int result = 0;
    for (int i = 3; i < argc; i++) {
        const auto scenario = scenarios.find(argv[i]);
        if (scenario == scenarios.end()) {
            fprintf(stderr, "scenarios: no scenario %s\n", argv[i]);
            return 2;
        }
        try {
            scenario->second();
            printf("%s: ok\n", argv[i]);
        } catch (const std::exception & error) {
            printf("%s: %s\n", argv[i], error.what());
            result = 1;
        }
        fflush(stdout);
    }
    return result;
}
