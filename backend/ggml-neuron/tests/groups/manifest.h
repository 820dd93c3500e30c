// Groups of graphs as entries of a manifest.

#pragma once

#include "ggml.h"
#include "graph.h"
#include "select/groups.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

class manifest {
  public:
    std::string text() const {
        return "format: 1\nname: groups\ntargets: [trn1]\nkernels:\n" + kernels + "graphs:\n" + graphs;
    }

    void add(const graph & g, const std::string & name) {
        const auto work = g.work();
        for (ggml_tensor * node : work) {
            add_kernel(node);
        }
        for (size_t i = 0; i < g.groups.size(); i++) {
            add_group(g, work, g.groups[i], name + "_" + std::to_string(i));
        }
    }

  private:
    std::string           kernels;
    std::string           graphs;
    std::set<std::string> known;

    static std::string tensor(const ggml_tensor * t) {
        std::ostringstream out;
        out << "(" << t->ne[0] << "," << t->ne[1] << "," << t->ne[2] << "," << t->ne[3] << ")/"
            << ggml_type_name(t->type);
        if (!ggml_is_contiguous(t)) {
            out << "/(" << t->nb[0] << "," << t->nb[1] << "," << t->nb[2] << "," << t->nb[3] << ")";
        }
        return out.str();
    }

    static std::string op(const ggml_tensor * t) {
        std::string name = ggml_op_desc(t);
        std::transform(name.begin(), name.end(), name.begin(), [](char c) { return (char) std::tolower(c); });
        return name;
    }

    // Parameters of the ops in these graphs.
    static std::string params(const ggml_tensor * t, const char * more = "") {
        char  text[96] = "";
        float f[2];
        memcpy(f, t->op_params, sizeof(f));
        if (t->op == GGML_OP_RMS_NORM) {
            snprintf(text, sizeof(text), ", params: {eps: %.9g}", f[0]);
        } else if (t->op == GGML_OP_SCALE) {
            snprintf(text, sizeof(text), ", params: {s: %.9g, b: %.9g}", f[0], f[1]);
        } else if (t->op == GGML_OP_SOFT_MAX || t->op == GGML_OP_FLASH_ATTN_EXT) {
            snprintf(text, sizeof(text), ", params: {scale: %.9g, max_bias: %.9g%s}", f[0], f[1], more);
        }
        return text;
    }

    void add_kernel(const ggml_tensor * node) {
        std::string line = "  - {op: " + op(node) + ", inputs: [";
        for (int i = 0; i < neuron_n_src(node); i++) {
            line += (i ? ", \"" : "\"") + tensor(node->src[i]) + "\"";
        }
        line += "], output: \"" + tensor(node) + "\"" + params(node);
        const int alias = neuron_alias_of(node);
        if (alias != NEURON_KERNELS_NO_ALIAS && node->op != GGML_OP_SET_ROWS && node->op != GGML_OP_CPY) {
            line += ", alias: " + std::to_string(alias);
        }
        if (known.insert(line).second) {
            kernels += line + "}\n";
        }
    }

    void add_group(const graph &                      g,
                   const std::vector<ggml_tensor *> & work,
                   std::pair<int, int>                range,
                   const std::string &                name) {
        std::map<const ggml_tensor *, std::string> names;  // by root
        std::string                                inputs;
        std::string                                nodes;
        std::string                                outputs;
        const auto                                 reference = [&](const ggml_tensor * t) {
            const ggml_tensor * root = t->view_src ? t->view_src : t;
            auto                it   = names.find(root);
            if (it == names.end()) {
                it = names.emplace(root, "s" + std::to_string(names.size())).first;
                inputs += "      " + it->second + ": \"" + tensor(root) + "\"\n";
            }
            return it->second + "+" + std::to_string(t->view_src ? t->view_offs : 0) + " " + tensor(t);
        };
        for (int i = range.first; i <= range.second; i++) {
            ggml_tensor * node = work[(size_t) i];
            std::string   from;
            for (int s = 0; s < neuron_n_src(node); s++) {
                from += (s ? ", \"" : "\"") + reference(node->src[s]) + "\"";
            }
            const std::string own = "n" + std::to_string(i);
            const std::string to  = node->view_src ? reference(node) : tensor(node);
            nodes += "      - {name: " + own + ", op: " + op(node) + ", inputs: [" + from + "], output: \"" + to +
                     "\"" + params(node, g.before ? ", causal: true" : "") + "}\n";
            if (!node->view_src) {
                names[node] = own;
                if (is_seen(g, work, range, node)) {
                    outputs += (outputs.empty() ? "" : ", ") + own;
                }
            }
        }
        const std::string body = "    inputs:\n" + inputs + "    nodes:\n" + nodes + "    outputs: [" + outputs + "]\n";
        if (known.insert(body).second) {
            graphs += "  - name: " + name + "\n" + body;
        }
    }

    // Returns whether nodes outside of the group use a node's result, or it is an output.
    static bool is_seen(const graph &                      g,
                        const std::vector<ggml_tensor *> & work,
                        std::pair<int, int>                range,
                        const ggml_tensor *                node) {
        bool used = false;
        for (int i = 0; i < (int) work.size(); i++) {
            for (const ggml_tensor * src : work[(size_t) i]->src) {
                const bool of = src && (src == node || src->view_src == node);
                used          = used || of;
                if (of && (i < range.first || i > range.second)) {
                    return true;
                }
            }
            if (work[(size_t) i]->view_src == node && (i < range.first || i > range.second)) {
                return true;
            }
        }
        return !used || (node->flags & GGML_TENSOR_FLAG_OUTPUT);
        GGML_UNUSED(g);
    }
};
