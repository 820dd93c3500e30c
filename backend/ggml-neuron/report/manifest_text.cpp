#include "report/manifest_text.h"

#include "../../bundle/src/ascii.h"
#include "../../bundle/src/hash.h"
#include "../../bundle/src/key.h"
#include "select/kernel_store.h"
#include "select/numbers.h"
#include "weights/layouts.h"

#include <charconv>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstring>

//
// kernelgen's table of ops: generated
//

namespace {

// A parameter of an op.
struct neuron_param {
    enum kind_t { INT, FLOAT, BOOL };

    const char * name;
    int          word;  // of op_params
    kind_t       kind;
    bool         has_default;
    int32_t      default_bits;
    bool         infinite;    // whether an infinite value is allowed
    int32_t      choices[8];  // allowed values; all 0 when any is allowed
};

// A combination of types that emitters take: ggml types by input, as bits of their numbers.
struct neuron_types {
    uint64_t masks[GGML_MAX_SRC];
};

struct neuron_op {
    const char *         name;
    bool                 variant;   // of UNARY or GLU: word 0 of op_params holds the variant
    int                  n_inputs;  // of the emitter
    int                  required;
    int                  alias;     // the input whose memory the result always shares
    const neuron_param * params;
    size_t               n_params;
    const neuron_types * types;
    size_t               n_types;
};

#include "report/op_table.inc"

constexpr int N_PARAM_WORDS = GGML_MAX_OP_PARAMS / sizeof(int32_t);

const neuron_op * find_op(const std::string & name) {
    for (const neuron_op & op : NEURON_OPS) {
        if (name == op.name) {
            return &op;
        }
    }
    return nullptr;
}

// Returns "(4096,512,1,1)/f32", with strides when the tensor has gaps or another order. Strides of dimensions with one
// element mean nothing and count as dense, as in a kernel's key.
std::string tensor_text(const neuron_kernels_tensor & t) {
    const ggml_type type  = neuron_plain_type(t.type);
    const int64_t   block = ggml_blck_size(type);
    const size_t    unit  = ggml_type_size(type);
    size_t          nb[GGML_MAX_DIMS];
    nb[0]        = t.ne[0] > block ? t.nb[0] : unit;
    bool   dense = nb[0] == unit;
    size_t next  = unit * (size_t) (t.ne[0] / block);
    for (int i = 1; i < GGML_MAX_DIMS; i++) {
        const size_t after = i == 1 ? nb[0] * (size_t) (t.ne[0] / block) : nb[i - 1] * (size_t) t.ne[i - 1];
        nb[i]              = t.ne[i] > 1 ? t.nb[i] : after;
        dense              = dense && nb[i] == next;
        next *= (size_t) t.ne[i];
    }
    char text[256];
    snprintf(text, sizeof(text), "(%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 ")/%s", t.ne[0], t.ne[1], t.ne[2],
             t.ne[3], ggml_type_name(type));
    std::string result = text;
    if (const int32_t layout = t.type >> NEURON_KERNELS_FORM_SHIFT) {
        result += std::string(":") + neuron_layout_name(layout);
    }
    if (!dense) {
        snprintf(text, sizeof(text), "/(%zu,%zu,%zu,%zu)", nb[0], nb[1], nb[2], nb[3]);
        result += text;
    }
    return result;
}

std::string tensor_text(const ggml_tensor * t) {
    return tensor_text(neuron_tensor_of(t));
}

bool is_dense(const ggml_tensor * t) {
    return tensor_text(t).find("/(") == std::string::npos;
}

// Returns the shortest decimal number with this binary32 value, in the form of printf("%g") with a decimal point;
// printf itself depends on the program's locale.
std::string shortest_text(float value) {
    for (int digits = 1;; digits++) {
        char   text[32];
        char * end  = std::to_chars(text, text + sizeof(text), value, std::chars_format::general, digits).ptr;
        float  same = 0;
        std::from_chars(text, end, same);
        if (same == value || digits == 9) {
            return std::string(text, end);
        }
    }
}

// Returns the same in YAML's form.
std::string float_text(float value) {
    if (std::isinf(value)) {
        return value > 0 ? ".inf" : "-.inf";
    }
    std::string result = shortest_text(value);
    // readers of YAML 1.1 take 1e-05 for a string
    if (result.find('.') == std::string::npos) {
        const size_t e = result.find('e');
        result.insert(e == std::string::npos ? result.size() : e, ".0");
    }
    return result;
}

std::string param_text(const neuron_param & p, int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return p.kind == neuron_param::FLOAT  ? float_text(value)
           : p.kind == neuron_param::BOOL ? (bits ? "true" : "false")
                                          : std::to_string(bits);
}

// Returns the words of a node's parameters that may have any values, by a bit for each; only nodes to be recorded have
// some.
uint32_t open_words(const ggml_tensor * op) {
    return neuron_has_numbers(op) ? (uint32_t) op->op_params[NEURON_OPEN_WORD] : 0;
}

std::string params_text(const ggml_tensor * op, const neuron_op * known) {
    const uint32_t open  = open_words(op);
    uint32_t       named = (known && known->variant ? 1u : 0u) | (open ? 1u << NEURON_OPEN_WORD : 0u);
    std::string    text;
    const auto     add = [&text](const std::string & name, const std::string & value) {
        text += (text.empty() ? "" : ", ") + name + ": " + value;
    };
    for (size_t i = 0; known && i < known->n_params; i++) {
        const neuron_param & p    = known->params[i];
        const int32_t        bits = op->op_params[p.word];
        named |= 1u << p.word;
        if (open & 1u << p.word) {
            add(p.name, "any");
            continue;
        }
        if (p.has_default && bits == p.default_bits) {
            continue;
        }
        add(p.name, param_text(p, bits));
    }
    for (int word = 0; word < N_PARAM_WORDS; word++) {
        if (!(named & 1u << word) && op->op_params[word]) {
            add("word" + std::to_string(word), std::to_string(op->op_params[word]));
        }
    }
    return text;
}

// Returns why no kernel can be built for a node, or NULL when one can.
const char * why_not(const ggml_tensor * op, const neuron_op * known, int alias) {
    if (!known || !known->n_types) {
        return "no emitter for this op";
    }
    const int n_src = neuron_n_src(op);
    if (n_src < known->required || n_src > known->n_inputs) {
        return "no emitter for these inputs";
    }
    bool fits = false;
    for (size_t row = 0; row < known->n_types && !fits; row++) {
        fits = true;
        for (int i = 0; i < known->n_inputs && fits; i++) {
            const int bit = op->src[i] ? (int) op->src[i]->type : 63;
            fits          = (i >= n_src && i >= known->required) || (known->types[row].masks[i] >> bit & 1);
        }
    }
    if (!fits) {
        return "no emitter for these types";
    }
    for (int i = 0; i < n_src; i++) {
        if (op->src[i] && ggml_is_empty(op->src[i])) {
            return "an input without elements";
        }
    }
    for (int i = 0; i < n_src; i++) {
        const bool in_layout = op->src[i] && neuron_type_of(op->src[i]) != op->src[i]->type;
        const bool weight    = i == 0 && (op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID);
        if (in_layout &&
            (!weight || neuron_type_of(op->src[i]) >> NEURON_KERNELS_FORM_SHIFT == NEURON_LAYOUT_SCATTERED)) {
            return "a weight in a layout that kernels for this op don't take";
        }
    }
    // conv_2d_dw keeps channels contiguous if its image has them contiguous
    if (alias == NEURON_KERNELS_NO_ALIAS && !is_dense(op) && op->op != GGML_OP_CONV_2D_DW) {
        return "no emitter for results with gaps";
    }
    uint32_t named = (known->variant ? 1u : 0u) | (open_words(op) ? 1u << NEURON_OPEN_WORD : 0u);
    for (size_t i = 0; i < known->n_params; i++) {
        const neuron_param & p = known->params[i];
        named |= 1u << p.word;
        bool any    = true;
        bool listed = false;
        for (const int32_t choice : p.choices) {
            any    = any && choice == 0;
            listed = listed || choice == op->op_params[p.word];
        }
        if (!any && !listed) {
            return "no emitter for these parameters";
        }
        float value;
        memcpy(&value, &op->op_params[p.word], sizeof(value));
        if (p.kind == neuron_param::FLOAT && std::isnan(value)) {
            return "a parameter that is not a number";
        }
        if (p.kind == neuron_param::FLOAT && std::isinf(value) && !p.infinite) {
            return "a parameter that is infinite";
        }
    }
    for (int word = 0; word < N_PARAM_WORDS; word++) {
        if (!(named & 1u << word) && op->op_params[word]) {
            return "no emitter for these parameters";
        }
    }
    return nullptr;
}

// Returns a node as a manifest entry; `known` names the parameters.
std::string format_text(const ggml_tensor * op, const std::string & name, const neuron_op * known, int alias) {
    std::string text = "{op: \"" + name + "\", inputs: [";
    for (int i = 0; i < neuron_n_src(op); i++) {
        text += (i ? ", " : "") + (op->src[i] ? "\"" + tensor_text(op->src[i]) + "\"" : "null");
    }
    text += "], output: \"" + tensor_text(op) + "\"";
    const std::string params = params_text(op, known);
    if (!params.empty()) {
        text += ", params: {" + params + "}";
    }
    if (alias != NEURON_KERNELS_NO_ALIAS && !(known && known->alias == alias)) {
        text += ", alias: " + std::to_string(alias);
    }
    return text + "}";
}

}  // namespace

neuron_manifest_text neuron_manifest_text_of(const ggml_tensor * op) {
    const std::string name  = nk::lower(ggml_op_desc(op));
    const neuron_op * known = find_op(name);
    const int         alias = neuron_alias_of(op);
    return { format_text(op, name, known, alias), format_text(op, name, nullptr, alias), why_not(op, known, alias) };
}

uint64_t neuron_fingerprint(const ggml_tensor * op) {
    nk::word_hash h;
    const auto    add_tensor = [&h](const ggml_tensor * t) {
        h.add((uint64_t) neuron_type_of(t));
        for (int i = 0; i < GGML_MAX_DIMS; i++) {
            h.add((uint64_t) t->ne[i]);
            h.add(t->ne[i] > 1 ? t->nb[i] : 0);
        }
    };
    h.add((uint64_t) op->op);
    h.add((uint64_t) (int64_t) neuron_alias_of(op));
    for (const int32_t word : op->op_params) {
        h.add((uint32_t) word);
    }
    add_tensor(op);
    for (const ggml_tensor * src : op->src) {
        if (src) {
            add_tensor(src);
        } else {
            h.add(nk::ABSENT_WORD);
        }
    }
    return h.value();
}

bool neuron_can_be_built(const ggml_tensor * op) {
    return why_not(op, find_op(nk::lower(ggml_op_desc(op))), neuron_alias_of(op)) == nullptr;
}

std::string neuron_manifest_line(const ggml_tensor * op, const char ** reason) {
    const neuron_manifest_text e = neuron_manifest_text_of(op);
    *reason                      = e.reason;
    return "- " + e.text;
}

std::string neuron_tensor_text(const neuron_kernels_tensor & t) {
    return t.type == NEURON_KERNELS_ABSENT ? "absent" : tensor_text(t);
}

void neuron_add_param_differences(const ggml_tensor *        op,
                                  const int32_t *            kernel_params,
                                  std::vector<std::string> & found) {
    const neuron_op * known = find_op(nk::lower(ggml_op_desc(op)));
    const uint32_t    open =
        neuron_has_numbers(op) ? (uint32_t) kernel_params[NEURON_OPEN_WORD] : 0;  // these may have any values
    uint32_t   named = (known && known->variant ? 1u : 0u) | (open ? 1u << NEURON_OPEN_WORD : 0u);
    const auto add   = [&](const std::string & name, const std::string & have, const std::string & want) {
        found.push_back(name + " is " + have + ", not " + want);
    };
    for (size_t i = 0; known && i < known->n_params; i++) {
        const neuron_param & p = known->params[i];
        named |= 1u << p.word;
        if (!(open & 1u << p.word) && kernel_params[p.word] != op->op_params[p.word]) {
            add(p.name, param_text(p, kernel_params[p.word]), param_text(p, op->op_params[p.word]));
        }
    }
    for (int word = 0; word < N_PARAM_WORDS; word++) {
        if (!(named & 1u << word) && kernel_params[word] != op->op_params[word]) {
            add("word" + std::to_string(word), std::to_string(kernel_params[word]),
                std::to_string(op->op_params[word]));
        }
    }
}

std::string neuron_describe(const ggml_tensor * op) {
    const std::string name = nk::lower(ggml_op_desc(op));
    std::string       text = name;
    for (int i = 0; i < neuron_n_src(op); i++) {
        text += (i ? ", " : " of ") + (op->src[i] ? tensor_text(op->src[i]) : "none");
    }
    const char * reason = why_not(op, find_op(name), neuron_alias_of(op));
    return text + (reason ? std::string(" (") + reason + ")" : "");
}
