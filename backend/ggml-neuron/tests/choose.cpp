// Prints which pieces the backend makes, for tests/ggml_neuron to compare with kernelgen.pieces.
//
//     choose TARGET LNC queued|waited < cases
//
// A case is a line of numbers: tokens, 1 when rows may be computed twice, bytes that are read for any number of tokens, bytes of
// a token, and for which numbers of tokens there are kernels. Printed is a line of `first:n` for each piece.

#include "select/costs.h"
#include "select/tokens.h"

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>

int main(int argc, char ** argv) {
    if (argc != 4) {
        return 2;
    }
    neuron_costs::use(argv[1], (uint32_t) atoi(argv[2]), std::string(argv[3]) == "queued");
    std::string line;
    while (std::getline(std::cin, line)) {
        std::istringstream   words(line);
        int64_t              n     = 0;
        int                  again = 0;
        double               whole = 0;
        double               row   = 0;
        std::vector<int64_t> counts;
        std::vector<double>  costs;
        words >> n >> again >> whole >> row;
        for (int64_t count; words >> count;) {
            counts.push_back(count);
            costs.push_back(neuron_costs::get().launch(whole, row, count));
        }
        const char * separator = "";
        for (const neuron_range & piece : neuron_choose_pieces(n, counts, costs, again != 0)) {
            printf("%s%lld:%lld", separator, (long long) piece.first, (long long) piece.n);
            separator = " ";
        }
        printf("\n");
    }
    return 0;
}
