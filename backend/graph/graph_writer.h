// Writes a graph of ggml in the format of docs/reference/graphs.md, for export-graphs, and for the backend when it
// records graphs.

#pragma once

#include "ggml.h"
#include "json.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

constexpr int GRAPH_FORMAT_VERSION = 1;

// Numbers the tensors of a graph and writes them: nodes in the order of computation, and other tensors before their
// first use. A tensor that is not a node of the graph is an input, even if another graph computed it.
class graph_writer {
  public:
    // Returns the role of a tensor in the graph ("weight", "cache", "input", "output"), or NULL.
    using role_of_t = std::function<const char *(const ggml_tensor *)>;

    graph_writer(json_line & out, role_of_t role_of) : out(out), role_of(std::move(role_of)) {}

    void write(ggml_cgraph * graph) {
        for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
            in_graph.insert(ggml_graph_node(graph, i));
        }
        for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
            number_of(ggml_graph_node(graph, i));
        }
    }

    // Writes the sum over `n_devices` devices that replaces `t`, which was written before: a node in the memory of `t`
    // that every later node has as its source.
    void write_all_reduce(const ggml_tensor * t, int n_devices) {
        const int storage = t->view_src ? storage_of(t->view_src) : storage_of(t);
        const int source  = number_of(t);
        places.emplace(t, source);
        const int number       = n_written++;
        numbers[t]             = number;
        const std::string name = std::string(t->name) + " (sum)";
        begin_tensor(name.c_str(), "all_reduce", t);
        write_array("src", &source, 1);
        write_array("params", &n_devices, 1);
        const int64_t view[] = { storage, (int64_t) (t->view_src ? t->view_offs : 0) };
        write_array("view", view, 2);
        out.end_object();
    }

  private:
    // Returns the number of the tensor whose memory `t` uses: a sum is in the memory of its source.
    int storage_of(const ggml_tensor * t) {
        const int  number = number_of(t);
        const auto found  = places.find(t);
        return found == places.end() ? number : found->second;
    }

    void begin_tensor(const char * name, const char * op, const ggml_tensor * t) {
        out.begin_object();
        out.text("name", name);
        out.text("op", op);
        out.text("type", ggml_type_name(t->type));
        write_array("ne", t->ne, GGML_MAX_DIMS);
        write_array("nb", t->nb, GGML_MAX_DIMS);
    }

    int number_of(const ggml_tensor * t) {
        const auto found = numbers.find(t);
        if (found != numbers.end()) {
            return found->second;
        }
        // Sources come before the nodes that use them. A graph already has this order, so the recursion is never deep.
        int       sources[GGML_MAX_SRC];
        int       n_src  = 0;
        const int n_seen = in_graph.count(t) ? GGML_MAX_SRC : 0;
        for (int i = 0; i < n_seen; i++) {
            // some ops are their own source: a placeholder for their own type
            sources[i] = !t->src[i] ? -1 : t->src[i] == t ? SELF : number_of(t->src[i]);
            n_src      = t->src[i] ? i + 1 : n_src;
        }
        const int root   = t->view_src ? storage_of(t->view_src) : -1;
        const int number = n_written++;
        numbers[t]       = number;
        std::replace(sources, sources + n_src, SELF, number);
        write_tensor(t, sources, n_src, root);
        return number;
    }

    template <typename T> void write_array(const char * key, const T * values, int count) {
        out.begin_array(key);
        for (int i = 0; i < count; i++) {
            out.number((int64_t) values[i]);
        }
        out.end_array();
    }

    void write_tensor(const ggml_tensor * t, const int * sources, int n_src, int root) {
        const bool  is_node = in_graph.count(t) != 0;
        std::string op      = is_node ? ggml_op_desc(t) : "none";
        std::transform(op.begin(), op.end(), op.begin(), [](char c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; });
        int n_params = is_node ? GGML_MAX_OP_PARAMS / (int) sizeof(int32_t) : 0;
        while (n_params > 0 && t->op_params[n_params - 1] == 0) {
            n_params--;
        }
        begin_tensor(t->name, op.c_str(), t);
        if (n_src) {
            write_array("src", sources, n_src);
        }
        if (n_params) {
            write_array("params", t->op_params, n_params);
        }
        if (root >= 0) {
            const int64_t view[] = { root, (int64_t) t->view_offs };
            write_array("view", view, 2);
        }
        if (const char * role = role_of(t)) {
            out.text("role", role);
        }
        // A branch that this graph does not take: see ggml_build_forward_select.
        if (is_node && !is_view_op(t->op) && !(t->flags & GGML_TENSOR_FLAG_COMPUTE)) {
            out.boolean("skipped", true);
        }
        out.end_object();
    }

    static bool is_view_op(ggml_op op) {
        return op == GGML_OP_NONE || op == GGML_OP_VIEW || op == GGML_OP_RESHAPE || op == GGML_OP_PERMUTE ||
               op == GGML_OP_TRANSPOSE;
    }

    static constexpr int SELF = -2;

    json_line &                                  out;
    const role_of_t                              role_of;
    int                                          n_written = 0;
    std::unordered_map<const ggml_tensor *, int> numbers;
    std::unordered_map<const ggml_tensor *, int> places;  // by sources of sums
    std::unordered_set<const ggml_tensor *>      in_graph;
};
