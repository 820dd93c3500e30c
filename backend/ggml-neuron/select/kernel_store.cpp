#include "select/kernel_store.h"

#include "../../bundle/src/graph_key.h"
#include "../../bundle/src/hash.h"
#include "../../bundle/src/key.h"
#include "report/environment.h"
#include "report/log.h"
#include "select/key_nodes.h"
#include "select/tensors.h"
#include "targets.h"
#include "weights/layouts.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

//
// nodes
//

int neuron_n_src(const ggml_tensor * op) {
    int n = GGML_MAX_SRC;
    while (n > 0 && !op->src[n - 1]) {
        n--;
    }
    return n;
}

bool neuron_is_view_op(enum ggml_op op) {
    return op == GGML_OP_NONE || op == GGML_OP_RESHAPE || op == GGML_OP_VIEW || op == GGML_OP_PERMUTE ||
           op == GGML_OP_TRANSPOSE;
}

bool neuron_is_noop(const ggml_tensor * op) {
    if (ggml_is_empty(op)) {
        return true;
    }
    // the result is the destination, which has elements even when none is written
    return (op->op == GGML_OP_SET_ROWS || op->op == GGML_OP_CPY) && op->src[0] && ggml_is_empty(op->src[0]);
}

bool neuron_is_work(const ggml_tensor * node) {
    return (node->flags & GGML_TENSOR_FLAG_COMPUTE) && !neuron_is_view_op(node->op) && !neuron_is_noop(node);
}

bool neuron_is_zero(const ggml_tensor * op) {
    // llama.cpp adds a row to the logits of a call without outputs, for samplers that are not used
    if (op->op == GGML_OP_PAD) {
        return !ggml_is_empty(op) && ggml_is_contiguous(op) && ggml_is_empty(op->src[0]);
    }
    // other ops then have no result elements, or can't be made
    return (op->op == GGML_OP_CONV_2D || op->op == GGML_OP_CONV_3D) && !ggml_is_empty(op) && ggml_is_contiguous(op) &&
           (ggml_is_empty(op->src[0]) || ggml_is_empty(op->src[1]));
}

int neuron_alias_of(const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_SET_ROWS:
            return 2;
        case GGML_OP_CPY:
            return 1;
        default:
            break;
    }
    if (!op->view_src) {
        return NEURON_KERNELS_NO_ALIAS;
    }
    // made by a ggml_..._inplace function: a view of a whole source
    for (int i = 0; i < neuron_n_src(op); i++) {
        const ggml_tensor * src = op->src[i];
        if (!src) {
            continue;
        }
        if (neuron_root_of(src) == op->view_src && neuron_offset_of(src) == op->view_offs && src->type == op->type &&
            ggml_nbytes(src) == ggml_nbytes(op)) {
            return i;
        }
    }
    return NEURON_KERNELS_NO_ALIAS;
}

uint32_t neuron_updates_of(const ggml_tensor * op) {
    return op->op == GGML_OP_OPT_STEP_ADAMW ? 1u << 2 | 1u << 3 : 0;
}

neuron_kernels_tensor neuron_tensor_of(const ggml_tensor * t) {
    neuron_kernels_tensor d;
    if (!t) {
        d      = {};
        d.type = NEURON_KERNELS_ABSENT;
        return d;
    }
    d.type = neuron_type_of(t);
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        d.ne[i] = t->ne[i];
        d.nb[i] = t->nb[i];
    }
    return d;
}

neuron_signature neuron_unhashed_signature_of(const ggml_tensor * op) {
    neuron_signature s;
    s.op        = ggml_op_desc(op);
    s.op_params = op->op_params;
    s.n_src     = neuron_n_src(op);
    s.alias     = neuron_alias_of(op);

    s.is_in_place_only = op->op == GGML_OP_SET_ROWS || op->op == GGML_OP_CPY;
    for (int i = 0; i < s.n_src; i++) {
        s.tensors[i] = neuron_tensor_of(op->src[i]);
    }
    s.tensors[s.n_src] = neuron_tensor_of(op);
    return s;
}

neuron_signature neuron_signature_of(const ggml_tensor * op) {
    neuron_signature s = neuron_unhashed_signature_of(op);
    s.op_hash          = nk::hash_op(s.op);
    return s;
}

//
// ops of a bundle regardless of shapes

static const uint64_t * read_tensor(const uint64_t * words, neuron_kernels_tensor & t) {
    if (*words == nk::ABSENT_WORD) {
        t = neuron_tensor_of(nullptr);
        return words + 1;
    }
    t = neuron_tensor_of_words(words);
    return words + nk::TENSOR_WORDS;
}

// Returns a signature from a kernel's key; its parameters are not copied. The number of its inputs is at most
// GGML_MAX_SRC.
static neuron_signature describe(const uint64_t * words) {
    neuron_signature s;
    s.op_hash = words[0];
    s.n_src   = (int) (uint32_t) words[1];
    s.alias   = (int) (words[1] >> 32) - 1;
    words += 2;
    for (int i = 0; i <= s.n_src; i++) {
        words = read_tensor(words, s.tensors[i]);
    }
    s.op_params = (const int32_t *) words;
    return s;
}

// Notes the sizes of a product of several heads, which may belong to attention.
void neuron_kernel_store::add_heads(const neuron_signature & kernel) {
    const neuron_kernels_tensor & result = kernel.tensors[kernel.n_src];
    if (kernel.op_hash == neuron_key_ops::get().mul_mat && result.ne[2] > 1 && result.ne[3] == 1) {
        neuron_add_sizes(heads[result.ne[2]], { result.ne[1], result.ne[0], nullptr, NEURON_KERNELS_NOT_FOUND });
    }
}

// Notes the rows of a SET_ROWS's destination.
void neuron_kernel_store::add_written(const neuron_kernels_tensor & into) {
    if (into.ne[2] == 1 && into.ne[3] == 1) {
        written[{ into.type, into.ne[0] }].insert(into.ne[NEURON_SET_ROWS_AXIS]);
    }
}

// Notes the candidates of a sampler: llama.cpp adds a row to the logits before it samples from a row of them.
void neuron_kernel_store::add_candidates(uint64_t op, const neuron_kernels_tensor & result) {
    if (op == neuron_key_ops::get().pad || op == neuron_key_ops::get().top_k) {
        sampled.insert(result.ne[0]);
    }
}

// Notes the number of heads in attention with sinks.
void neuron_kernel_store::add_sinks(uint64_t op, size_t source, const neuron_kernels_tensor & t) {
    const neuron_key_ops & ops = neuron_key_ops::get();
    if ((op == ops.flash_attn_ext && source == NEURON_FLASH_ATTN_MASK + 1) ||
        (op == ops.soft_max && source == NEURON_SOFT_MAX_MASK + 1)) {
        sinks.insert(t.ne[0]);
    }
}

// Returns a hash of an op on a weight of one shape in one layout.
static uint64_t weight_hash(uint64_t op, const uint64_t * tensor) {
    nk::word_hash h;
    h.add(op);
    for (size_t i = 0; i < nk::TENSOR_WORDS; i++) {
        h.add(tensor[i]);
    }
    return h.value();
}

// Notes the layout of a kernel's weight, its first input, if it has one. Skips layouts that this version lacks.
static void note_weight(neuron_bundle & bundle, uint64_t op, const uint64_t * tensor) {
    const auto layout = (int32_t) (*tensor >> NEURON_KERNELS_FORM_SHIFT);
    if (*tensor != nk::ABSENT_WORD && layout > 0 && layout <= NEURON_KERNELS_LAST_FORM) {
        bundle.weights.insert(weight_hash(op, tensor));
        bundle.layouts |= 1u << layout;
    }
}

// Notes the ops of a graph kernel's nodes: a kernel computes them, though together with other nodes.
void neuron_kernel_store::read_graph(neuron_bundle & bundle, int32_t number, const uint64_t * words, size_t n_words) {
    const neuron_key key(words, n_words);
    for (const neuron_key_node & node : key.nodes) {
        nk::word_hash signature;
        signature.add(node.op);
        for (const neuron_key_input & in : node.inputs) {
            signature.add(in.tensor ? *in.tensor : nk::ABSENT_WORD);
        }
        if (!node.inputs.empty() && node.inputs[0].tensor) {
            note_weight(bundle, node.op, node.inputs[0].tensor);
        }
        if (node.op == neuron_key_ops::get().set_rows) {
            add_written(neuron_tensor_of_words(node.tensor));
        }
        add_candidates(node.op, neuron_tensor_of_words(node.tensor));
        for (size_t i = 0; i < node.inputs.size(); i++) {
            if (node.inputs[i].tensor) {
                add_sinks(node.op, i, neuron_tensor_of_words(node.inputs[i].tensor));
            }
        }
        bundle.ops.insert(node.op);
        bundle.signatures.insert(signature.value());
    }
    groups.add(key, &bundle, number);
}

void neuron_kernel_store::read_signatures(neuron_bundle & bundle) {
    const size_t n = neuron_kernels_count(bundle.handle);
    for (size_t k = 0; k < n; k++) {
        size_t           n_words;
        const uint64_t * key   = neuron_kernels_key(bundle.handle, (int32_t) k, &n_words);
        const uint64_t * words = key;
        const uint64_t * end   = words + n_words;
        if (n_words <= nk::SOURCE_WORDS) {  // it has a name and no op
            continue;
        }
        if (key[0] == nk::hash_op(nk::GRAPH)) {
            bundle.graphs.push_back((int32_t) k);
            read_graph(bundle, (int32_t) k, key, n_words);
            continue;
        }
        const uint32_t n_inputs = (uint32_t) words[1];
        nk::word_hash  signature;
        signature.add(words[0]);
        bundle.ops.insert(words[0]);
        words += 2;
        if (n_inputs > 0) {
            note_weight(bundle, key[0], words);
        }
        for (uint32_t i = 0; i < n_inputs && words < end; i++) {
            signature.add(*words);
            words += *words == nk::ABSENT_WORD ? 1 : nk::TENSOR_WORDS;
        }
        bundle.signatures.insert(signature.value());
        if (n_inputs <= GGML_MAX_SRC) {
            const neuron_signature kernel = describe(key);
            tokens.add(kernel, &bundle, (int32_t) k);
            laid_out.add(kernel, &bundle, (int32_t) k);
            add_heads(kernel);
            if (key[0] == neuron_key_ops::get().set_rows) {
                add_written(kernel.tensors[kernel.n_src]);
            }
            add_candidates(key[0], kernel.tensors[kernel.n_src]);
            for (int i = 0; i < kernel.n_src; i++) {
                if (kernel.tensors[i].type != NEURON_KERNELS_ABSENT) {
                    add_sinks(key[0], (size_t) i, kernel.tensors[i]);
                }
            }
        }
    }
}

//
// searching
//

neuron_kernel neuron_kernel_store::find(const neuron_signature & node) const {
    const auto search = [&](int alias) -> neuron_kernel {
        for (const auto & bundle : bundles) {
            const int32_t number = neuron_kernels_find(bundle->handle, node.op, node.op_params, node.tensors,
                                                       (size_t) node.n_src, &node.tensors[node.n_src], alias);
            if (number != NEURON_KERNELS_NOT_FOUND) {
                return { bundle.get(), number, alias };
            }
        }
        return {};
    };
    const neuron_kernel found = search(node.alias);
    // A kernel whose result has its own memory can also compute an in-place node; the result is then copied.
    if (found || node.alias == NEURON_KERNELS_NO_ALIAS || node.is_in_place_only) {
        return found;
    }
    return search(NEURON_KERNELS_NO_ALIAS);
}

neuron_kernel neuron_kernel_store::find_graph(const std::vector<uint64_t> & words) const {
    for (const auto & bundle : bundles) {
        const int32_t number = neuron_kernels_find_words(bundle->handle, words.data(), words.size());
        if (number != NEURON_KERNELS_NOT_FOUND) {
            return { bundle.get(), number };
        }
    }
    return {};
}

void neuron_kernel_store::for_each(uint64_t                                                               op_hash,
                                   const std::function<void(const char * id, const neuron_signature &)> & use) const {
    for (const auto & bundle : bundles) {
        const size_t n = bundle->ops.count(op_hash) ? neuron_kernels_count(bundle->handle) : 0;
        for (size_t k = 0; k < n; k++) {
            const uint64_t * key = neuron_kernels_key(bundle->handle, (int32_t) k, nullptr);
            if (key[0] == op_hash && (uint32_t) key[1] <= GGML_MAX_SRC) {
                use(neuron_kernels_id(bundle->handle, (int32_t) k), describe(key));
            }
        }
    }
}

int64_t neuron_kernel_store::rows_written(const ggml_tensor * t, int64_t n) const {
    const auto found = written.find({ neuron_type_of(t), t->ne[0] });
    if (exact_only || found == written.end()) {
        return 0;
    }
    const auto rows = found->second.lower_bound(n);
    return rows == found->second.end() ? 0 : *rows;
}

bool neuron_kernel_store::has_signature(const ggml_tensor * op) const {
    nk::word_hash signature;
    signature.add(nk::hash_op(ggml_op_desc(op)));
    for (int i = 0; i < neuron_n_src(op); i++) {
        signature.add(op->src[i] ? (uint64_t) neuron_type_of(op->src[i]) : nk::ABSENT_WORD);
    }
    const uint64_t h = signature.value();
    return std::any_of(bundles.begin(), bundles.end(), [h](const auto & b) { return b->signatures.count(h) != 0; });
}

bool neuron_kernel_store::has_weight(const ggml_tensor * op, const ggml_tensor * weight, int32_t layout) const {
    const nk::type_traits * type = nk::find_type(weight->type);
    if (!layout || !type || op->src[0] != weight) {
        return false;
    }
    uint64_t words[nk::TENSOR_WORDS];
    words[0] = (uint64_t) neuron_type_in_layout(weight->type, layout);
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        words[1 + i] = (uint64_t) weight->ne[i];
        words[5 + i] = weight->nb[i];
    }
    if (!nk::canonicalize(*type, weight->ne, words + 5)) {
        return false;
    }
    const uint64_t h = weight_hash(nk::hash_op(ggml_op_desc(op)), words);
    return std::any_of(bundles.begin(), bundles.end(), [h](const auto & b) { return b->weights.count(h) != 0; });
}

bool neuron_kernel_store::has_layout(int32_t layout) const {
    return std::any_of(bundles.begin(), bundles.end(), [layout](const auto & b) { return b->layouts >> layout & 1; });
}

bool neuron_kernel_store::has_op(const char * name) const {
    const uint64_t h = nk::hash_op(name);
    return std::any_of(bundles.begin(), bundles.end(), [h](const auto & b) { return b->ops.count(h) != 0; });
}

bool neuron_kernel_store::covers_transformer() const {
    return (has_op("rms_norm") || has_op("norm")) && has_op("mul_mat") &&
           (has_op("flash_attn_ext") || has_op("soft_max")) && (has_op("set_rows") || has_op("cpy"));
}

size_t neuron_kernel_store::n_kernels() const {
    size_t n = 0;
    for (const auto & bundle : bundles) {
        n += neuron_kernels_count(bundle->handle);
    }
    return n;
}

neuron_programs neuron_kernel_store::programs() const {
    neuron_programs all;
    for (const auto & bundle : bundles) {
        const neuron_programs & one = bundle->programs;
        all.n += one.n;
        all.n_unstated += one.n_unstated;
        all.memory.bytes += one.memory.bytes;
        all.memory.scratchpad = std::max(all.memory.scratchpad, one.memory.scratchpad);
    }
    return all;
}

std::string neuron_kernel_store::target() const {
    return bundles.empty() ? "" : neuron_kernels_metadata(bundles.front()->handle, "target");
}

uint32_t neuron_kernel_store::lnc() const {
    return bundles.empty() ? 0 : neuron_kernels_lnc(bundles.front()->handle);
}

//
// opening
//

// Sums the memory of a bundle's programs.
static void read_memory(neuron_bundle & bundle) {
    std::vector<bool> seen(neuron_kernels_neff_count(bundle.handle));
    neuron_programs & programs = bundle.programs;
    programs.n                 = seen.size();
    for (int32_t i = 0; i < (int32_t) neuron_kernels_count(bundle.handle); i++) {
        const auto neff = (size_t) neuron_kernels_neff_index(bundle.handle, i);
        if (seen[neff]) {
            continue;
        }
        seen[neff]                         = true;
        const neuron_program_memory memory = neuron_kernel{ &bundle, i }.memory();
        programs.n_unstated += memory.bytes == 0;
        programs.memory.bytes += memory.bytes;
        programs.memory.scratchpad = std::max(programs.memory.scratchpad, memory.scratchpad);
    }
}

void neuron_kernel_store::add(const neuron_nrt & nrt, neuron_kernels * handle, std::string origin) {
    auto bundle    = std::make_unique<neuron_bundle>();
    bundle->handle = handle;
    bundle->origin = std::move(origin);

    const bool   simulated = neuron_kernels_simulated(handle) != 0;
    const char * target    = neuron_kernels_metadata(handle, "target");
    if (simulated && !nrt.simulator) {
        NEURON_ERROR("%s: left out: its kernels are for the simulator, and no NeuronCore can load them\n"
                     "build the manifest with the Neuron SDK's compiler: kernelgen build --compiler neuronx-cc\n"
                     "(in CMake COMPILER neuronx-cc, in Bazel --config=release)\n",
                     bundle->origin.c_str());
        return;
    }
    if (!simulated && nrt.simulator) {
        NEURON_ERROR("%s: left out: its kernels are compiled for a NeuronCore and can't run in the simulator\n"
                     "build the manifest with --compiler simulator, or use the Neuron SDK's libnrt\n",
                     bundle->origin.c_str());
        return;
    }
    if (!neuron_runs_on(target, nrt.target)) {
        NEURON_WARN("%s: left out: it is compiled for %s, and this is %s\n"
                    "if the machine is not that, set GGML_NEURON_TARGET\n",
                    bundle->origin.c_str(), target, nrt.target.c_str());
        return;
    }
    const uint32_t lnc = neuron_kernels_lnc(handle);
    if (!nrt.lnc_source.empty() && nrt.lnc != lnc) {
        NEURON_WARN("%s: left out: it is compiled for --lnc %u, and the NeuronCores have %u (%s)\n",
                    bundle->origin.c_str(), lnc, nrt.lnc, nrt.lnc_source.c_str());
        return;
    }
    bundle->position = (uint32_t) bundles.size();
    read_signatures(*bundle);
    read_memory(*bundle);
    NEURON_LOG("%s: %zu kernels for %s, %zu NEFFs by %s\n", bundle->origin.c_str(), neuron_kernels_count(handle),
               target, neuron_kernels_neff_count(handle), neuron_kernels_metadata(handle, "compiler"));
    bundles.push_back(std::move(bundle));
}

void neuron_kernel_store::open_pack(const neuron_nrt & nrt, const std::string & path) {
    char             message[NEURON_KERNELS_MESSAGE_SIZE];
    neuron_kernels * handle = nullptr;
    if (neuron_kernels_open_file(path.c_str(), &handle, message, sizeof(message)) != NEURON_KERNELS_OK) {
        NEURON_ERROR("kernels left out: %s\n", message);
        return;
    }
    add(nrt, handle, path);
}

static bool ends_with(const std::string & text, const char * end) {
    const size_t n = strlen(end);
    return text.size() >= n && text.compare(text.size() - n, n, end) == 0;
}

void neuron_kernel_store::open_path(const neuron_nrt & nrt, const std::string & path) {
    namespace fs = std::filesystem;
    std::error_code error;
    const auto      status = fs::status(path, error);
    if (status.type() == fs::file_type::not_found || status.type() == fs::file_type::none) {
        NEURON_ERROR("GGML_NEURON_KERNEL_DIR: %s: %s\n", path.c_str(),
                     error ? error.message().c_str() : "no such file or folder");
        return;
    }
    if (status.type() != fs::file_type::directory) {
        open_pack(nrt, path);
        return;
    }
    std::vector<std::string> packs;
    fs::directory_iterator   it(path, error);
    for (; !error && it != fs::directory_iterator(); it.increment(error)) {
        const std::string name = it->path().string();
        if (ends_with(name, ".kernels.gguf")) {
            packs.push_back(name);
        }
    }
    if (error) {
        NEURON_ERROR("GGML_NEURON_KERNEL_DIR: %s can't be read: %s\n", path.c_str(), error.message().c_str());
        return;
    }
    std::sort(packs.begin(), packs.end());
    for (const std::string & pack : packs) {
        open_pack(nrt, pack);
    }
    if (packs.empty()) {
        NEURON_WARN(
            "GGML_NEURON_KERNEL_DIR: %s holds no packs (*.kernels.gguf): name or build one; a tree (index.json) is "
            "not read\n",
            path.c_str());
    }
}

void neuron_kernel_store::open(const neuron_nrt & nrt, const std::vector<const neuron_kernels_table *> & embedded) {
    exact_only = neuron_switch("GGML_NEURON_EXACT", false);
    if (const char * paths = getenv("GGML_NEURON_KERNEL_DIR")) {
        const std::string text = paths;
        for (size_t start = 0; start <= text.size();) {
            const size_t end = std::min(text.find(':', start), text.size());
            if (end > start) {
                open_path(nrt, text.substr(start, end - start));
            }
            start = end + 1;
        }
    }
    for (const neuron_kernels_table * table : embedded) {
        char             message[NEURON_KERNELS_MESSAGE_SIZE];
        neuron_kernels * handle = nullptr;
        if (neuron_kernels_open_embedded(table, &handle, message, sizeof(message)) != NEURON_KERNELS_OK) {
            NEURON_ERROR("embedded kernels left out: %s\n", message);
            continue;
        }
        add(nrt, handle,
            std::string("embedded ") + neuron_kernels_metadata(handle, "name") + "_" +
                neuron_kernels_metadata(handle, "target"));
    }
}
