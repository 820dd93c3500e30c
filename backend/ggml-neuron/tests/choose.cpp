// Prints how the backend cuts nodes along their tokens, and its pieces. tests/ggml_neuron compares this with
// kernelgen.dispatch.lengths and kernelgen.ggml.tokens.
//
//     choose pieces TARGET LNC queued|waited < cases
//     choose cuts < cases
//
// A case of pieces is a line of numbers: tokens, 1 if rows may be computed twice, bytes that are read for any number of
// tokens, bytes per token, and the numbers of tokens that kernels exist for. The output is a line with `first:n` for
// each piece.
//
// A case of cuts is an op, the number of sources, and the tensors of a kernel and then of a node, each the sources and
// then the result: the type's number, extents and strides, or -1 for an absent tensor. The output is a line with the
// node's tokens, its cells (0: the backend searches for no kernel for more) and the axis of each tensor, or `none` if
// the kernel can't compute the node; and the reason if the node can't be cut at all.

#include "select/costs.h"
#include "select/tokens.h"
#include "src/key.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

static void print_pieces(std::istream & words) {
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

static neuron_signature read_signature(std::istream & words, const std::string & op, int n_src) {
    neuron_signature s;
    s.op_hash = nk::hash_op(op);
    s.n_src   = n_src;
    for (int i = 0; i <= n_src; i++) {
        neuron_kernels_tensor & t = s.tensors[i];
        t                         = {};
        words >> t.type;
        if (t.type < 0) {
            t.type = NEURON_KERNELS_ABSENT;
            continue;
        }
        for (int64_t & ne : t.ne) {
            words >> ne;
        }
        for (auto & nb : t.nb) {
            words >> nb;
        }
    }
    return s;
}

static void print_cut(std::istream & words) {
    std::string op;
    int         n_src = 0;
    words >> op >> n_src;
    neuron_token_index index;
    index.add(read_signature(words, op, n_src), nullptr, 0);
    const neuron_signature node = read_signature(words, op, n_src);
    neuron_cut             cut;
    if (index.find(node, cut)) {
        printf("%lld %lld", (long long) cut.n, (long long) std::max<int64_t>(cut.n_more, 0));
        for (int i = 0; i <= n_src; i++) {
            printf(" %d", cut.axis[i]);
        }
    } else {
        printf("none");
    }
    printf("|%s\n", neuron_why_not_cut(node).c_str());
}

int main(int argc, char ** argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    if (!(what == "pieces" && argc == 5) && !(what == "cuts" && argc == 2)) {
        fprintf(stderr, "usage: choose pieces TARGET LNC queued|waited | cuts\n");
        return 2;
    }
    if (what == "pieces") {
        neuron_costs::use(argv[2], (uint32_t) atoi(argv[3]), std::string(argv[4]) == "queued");
    }
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        what == "cuts" ? print_cut(words) : print_pieces(words);
    }
    return 0;
}
