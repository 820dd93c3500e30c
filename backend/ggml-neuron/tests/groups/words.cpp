// Groups as words of keys.

#include "../values.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "graph.h"
#include "select/group_key.h"

#include <algorithm>
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

void print_words(const std::string & line) {
    std::istringstream in(line);
    graph              g;
    neuron_group       group;
    size_t             n_nodes;
    in >> n_nodes;
    std::map<std::string, ggml_tensor *>           roots;
    std::vector<ggml_tensor *>                     nodes(n_nodes);
    std::map<std::string, std::pair<ggml_op, int>> ops;
    for (int op = 0; op < GGML_OP_COUNT; op++) {
        ops[ggml_op_name((ggml_op) op)] = { (ggml_op) op, -1 };
    }
    for (int op = 0; op < GGML_UNARY_OP_COUNT; op++) {
        ops[ggml_unary_op_name((ggml_unary_op) op)] = { GGML_OP_UNARY, op };
    }
    for (size_t i = 0; i < n_nodes; i++) {
        nodes[i] = ggml_new_tensor_1d(g.get(), GGML_TYPE_I8, 1);
    }
    const auto read_tensor = [&](const std::string & name, ggml_tensor * t, size_t at) {
        size_t offset;
        int    type;
        in >> offset >> type;
        t->type = (ggml_type) type;
        for (int64_t & ne : t->ne) {
            in >> ne;
        }
        for (size_t & nb : t->nb) {
            in >> nb;
        }
        if (name == "own") {
            return;
        }
        ggml_tensor * root = nullptr;
        if (name[0] == 'n') {
            root = nodes[std::stoul(name.substr(1))];
        } else {
            ggml_tensor *& slot = roots[name];
            slot                = slot ? slot : ggml_new_tensor_1d(g.get(), GGML_TYPE_I8, 1 << 20);
            root                = slot;
            offset +=
                4096 * (std::stoul(name.substr(1)) + 1);  // the first use is not at offset 0; this must have no effect
        }
        t->view_src  = root;
        t->view_offs = offset;
        t->src[at]   = root;
    };
    for (size_t i = 0; i < n_nodes; i++) {
        std::string op, name;
        bool        seen;
        int         n_inputs;
        in >> op >> seen;
        std::transform(op.begin(), op.end(), op.begin(), [](char c) { return (char) std::toupper(c); });
        ggml_tensor * node = nodes[i];
        check(ops.count(op) != 0, "no op " + op);
        node->op = ops[op].first;
        ggml_set_name(node, ("node" + std::to_string(i)).c_str());
        for (int32_t & param : node->op_params) {
            in >> param;
        }
        in >> n_inputs;
        for (int s = 0; s < n_inputs; s++) {
            in >> name;
            if (name == "-") {
                continue;
            }
            if (name == "n" + std::to_string(i)) {  // ggml_cast
                ggml_tensor ignored{};
                read_tensor("own", &ignored, 0);
                node->src[s] = node;
                continue;
            }
            ggml_tensor * view = ggml_new_tensor_1d(g.get(), GGML_TYPE_I8, 1);
            read_tensor(name, view, 0);
            view->op     = GGML_OP_VIEW;
            node->src[s] = view;
        }
        in >> name;
        ggml_tensor * own = node;
        ggml_tensor   result{};
        read_tensor(name, &result, 0);
        own->type = result.type;
        std::copy(result.ne, result.ne + 4, own->ne);
        std::copy(result.nb, result.nb + 4, own->nb);
        own->view_src  = result.view_src;
        own->view_offs = result.view_offs;
        check(!in.fail(), "not a group: " + line);
        g.add(node);
        if (seen) {
            ggml_set_output(node);
        }
    }
    for (int i = 0; i < g.cgraph->n_nodes; i++) {
        if (!neuron_is_view_op(g.cgraph->nodes[i]->op)) {
            group.nodes.push_back(i);
        }
    }
    const char * separator = "";
    for (const uint64_t word : neuron_group_words(g.cgraph, false, group)) {
        printf("%s%016" PRIx64, separator, word);
        separator = " ";
    }
    printf("\n");
}
