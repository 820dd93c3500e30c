// Prints the library's result for packs, for tests that compare it with kernelgen's result.
//
//     opens <PATHS
//
// Reads one path per line and prints one line for each: `ok` when the pack opens and each of its NEFFs matches the
// index, else the mistake.

#include "check.h"
#include "neuron_kernels.h"
#include "read_everything.h"

#include <iostream>
#include <string>

// Returns the mistake in a pack, or "".
static std::string problem_of(const std::string & path) {
    char             message[NEURON_KERNELS_MESSAGE_SIZE];
    neuron_kernels * bundle;
    if (neuron_kernels_open_file(path.c_str(), &bundle, message, sizeof(message)) != NEURON_KERNELS_OK) {
        return message;
    }
    test::read_everything(bundle);
    std::string problem;
    for (size_t i = 0; i < neuron_kernels_count(bundle) && problem.empty(); i++) {
        const int32_t kernel = static_cast<int32_t>(i);
        if (neuron_kernels_verify(bundle, kernel, message, sizeof(message)) != NEURON_KERNELS_OK) {
            problem = path + ": kernel " + neuron_kernels_id(bundle, kernel) + ": " + message;
        }
    }
    neuron_kernels_close(bundle);
    return problem;
}

int main() {
    for (std::string path; std::getline(std::cin, path);) {
        const std::string problem = problem_of(path);
        std::cout << (problem.empty() ? "ok" : problem) << '\n';
    }
    return test_result();
}
