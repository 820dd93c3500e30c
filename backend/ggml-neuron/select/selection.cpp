// Choosing the kernels that compute a node of any number of tokens and any length of the cache.

#include "../../bundle/src/hash.h"
#include "../../bundle/src/key.h"
#include "report/metrics.h"
#include "select/costs.h"
#include "select/kernel_store.h"
#include "select/tensors.h"
#include "select/unfused_attention.h"
#include "weights/layouts.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

std::vector<neuron_kernel> neuron_kernels_of(const neuron_selection & selection) {
    std::vector<neuron_kernel> found;
    for (const neuron_piece & piece : selection.pieces) {
        found.push_back(piece.kernel);
    }
    return found;
}

// Returns what is read for any number of tokens, and for each, in bytes.
static std::pair<double, double> traffic(const neuron_signature & node, const neuron_selection & selection) {
    double whole = 0;
    double row   = 0;
    for (int i = 0; i <= node.n_src; i++) {
        if (node.tensors[i].type == NEURON_KERNELS_ABSENT) {
            continue;
        }
        const auto bytes = (double) neuron_nbytes(selection.cut.piece(node, i, 1, selection.n_more));
        if (selection.cut.axis[i] >= 0) {
            row += bytes;
        } else if (i < node.n_src && i != node.alias && (selection.cut.more(i) < 0 || selection.cut.rule->mask >= 0)) {
            whole += bytes;  // of a table some rows are read, and of what is written to none
        }
    }
    return { whole, row };
}

// Returns whether a kernel's tensor is a node's: strides of one element mean nothing.
static bool is_same(const uint64_t * words, const neuron_kernels_tensor & t) {
    if ((int32_t) words[0] != t.type) {
        return false;
    }
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        if ((int64_t) words[1 + i] != t.ne[i] || (t.ne[i] != 1 && words[5 + i] != t.nb[i])) {
            return false;
        }
    }
    return true;
}

// Returns whether numbers are those of a kernel for a piece of the node. Other strides of the tokens' axis have the same hash.
static bool is_piece(const neuron_sizes & s, const neuron_signature & node, const neuron_cut & cut) {
    size_t           n_words;
    const uint64_t * words = neuron_kernels_key(s.bundle->handle, s.number, &n_words);
    if (words[0] != node.op_hash || words[1] != ((uint64_t) node.n_src | (uint64_t) (node.alias + 1) << 32)) {
        return false;
    }
    words += 2;
    for (int i = 0; i <= node.n_src; i++) {
        const bool absent = node.tensors[i].type == NEURON_KERNELS_ABSENT;
        if (absent ? *words != nk::ABSENT_WORD : !is_same(words, cut.piece(node, i, s.n, s.n_more))) {
            return false;
        }
        words += absent ? 1 : nk::TENSOR_WORDS;
    }
    return memcmp(words, node.op_params, nk::PARAM_WORDS * sizeof(uint64_t)) == 0;
}

// Returns the kernel for a piece of a node, or none.
neuron_kernel neuron_kernel_store::find_piece(const neuron_sizes &     s,
                                              const neuron_signature & node,
                                              const neuron_cut &       cut) const {
    if (is_piece(s, node, cut)) {
        return { s.bundle, s.number, node.alias, 0 };
    }
    neuron_signature piece = node;
    for (int i = 0; i <= node.n_src; i++) {
        piece.tensors[i] = cut.piece(node, i, s.n, s.n_more);
    }
    return find(piece, 0);
}

// Chooses kernels of one length, selection.n_more.
bool neuron_kernel_store::choose(const neuron_signature &          node,
                                 const std::vector<neuron_sizes> & sizes,
                                 neuron_selection &                selection) const {
    std::vector<int64_t> counts;
    std::vector<double>  costs;
    counts.reserve(sizes.size());
    costs.reserve(sizes.size());
    const auto [whole, row] = traffic(node, selection);
    const auto here         = [&](const neuron_sizes & s) {
        return s.n_more == selection.n_more;
    };
    const auto first = std::find_if(sizes.begin(), sizes.end(), here);  // ascending in n_more, then in n
    for (auto s = first; s != sizes.end() && here(*s); s++) {
        counts.push_back(s->n);
        costs.push_back(neuron_costs::get().launch(whole, row, s->n));
    }
    const bool                       again = node.alias == NEURON_KERNELS_NO_ALIAS || node.is_in_place_only;
    std::map<int64_t, neuron_kernel> kernels;
    const auto                       has = [&](int64_t n) {
        const auto s = std::find_if(first, sizes.end(), [n](const neuron_sizes & s) { return s.n == n; });
        return (bool) (kernels[n] = find_piece(*s, node, selection.cut));
    };
    for (const neuron_range & range :
         neuron_choose_pieces(selection.cut.n, std::move(counts), std::move(costs), again, has)) {
        selection.pieces.push_back({ kernels.at(range.n), range });
    }
    return !selection.pieces.empty();
}

// Returns whether the tensors that a node reads on are long enough for kernels of a length.
static bool has_room(const ggml_tensor * op, const neuron_signature & node, const neuron_cut & cut, int64_t n_more) {
    for (int i = 0; i < node.n_src; i++) {
        if (i == cut.rule->mask || cut.more(i) < 0 || !op->src[i]) {
            continue;
        }
        const ggml_tensor * src = op->src[i];
        if (neuron_offset_of(src) + neuron_nbytes(cut.piece(node, i, cut.n, n_more)) >
            ggml_nbytes(neuron_root_of(src))) {
            return false;
        }
    }
    return true;
}

neuron_selection neuron_kernel_store::select(const ggml_tensor * op) const {
    neuron_selection selection;
    if (bundles.empty()) {
        return selection;
    }
    neuron_signature node = neuron_unhashed_signature_of(op);
    if (const neuron_kernel exact = find(node, neuron_updates_of(op))) {
        selection.pieces.push_back({ exact, {} });
        return selection;
    }
    node.op_hash                            = nk::hash_op(node.op);
    const std::vector<neuron_sizes> * sizes = exact_only ? nullptr : tokens.find(node, selection.cut);
    if (!sizes) {
        return selection;
    }
    int64_t last = -2;                       // no length
    for (const neuron_sizes & s : *sizes) {  // ascending in n_more
        if (s.n_more < selection.cut.n_more || s.n_more == last) {
            continue;
        }
        last              = s.n_more;
        selection.n_more  = s.n_more;
        const bool masked = selection.cut.rule->mask >= 0 && s.n_more != selection.cut.n_more;
        if (masked && !has_room(op, node, selection.cut, s.n_more)) {
            break;  // nor for longer ones
        }
        if (choose(node, *sizes, selection)) {
            break;
        }
    }
    return selection;
}

// Answers that are kept: nodes of some graphs of a model with several hundred different ones.
static constexpr size_t MAX_ANSWERS = 1 << 13;

// Sets `key` to all that what is known of a node depends on: its op and tensors, and how far those that are views may be read on.
static void set_answer_key(const ggml_tensor * op, std::vector<uint64_t> & key) {
    const int  n_src      = neuron_n_src(op);
    const auto add_tensor = [&key](const ggml_tensor * t) {
        key.push_back((uint64_t) neuron_type_of(t));
        for (int i = 0; i < GGML_MAX_DIMS; i++) {
            key.push_back((uint64_t) t->ne[i]);
            key.push_back(t->nb[i]);
        }
        key.push_back(neuron_offset_of(t));
        key.push_back(ggml_nbytes(neuron_root_of(t)));
    };
    key.clear();
    key.push_back((uint64_t) op->op | (uint64_t) n_src << 32);
    key.push_back((uint64_t) (neuron_alias_of(op) + 1) | (uint64_t) (op->view_src != nullptr) << 32);
    for (size_t i = 0; i < sizeof(op->op_params) / sizeof(int32_t); i += 2) {
        key.push_back((uint32_t) op->op_params[i] | (uint64_t) (uint32_t) op->op_params[i + 1] << 32);
    }
    add_tensor(op);
    for (int i = 0; i < n_src; i++) {
        if (op->src[i]) {
            add_tensor(op->src[i]);
        } else {
            key.push_back(nk::ABSENT_WORD);
        }
    }
}

neuron_answer neuron_kernel_store::answer(const ggml_tensor * op) const {
    if (bundles.empty()) {
        return {};
    }
    thread_local std::vector<uint64_t> key;
    set_answer_key(op, key);
    {
        const std::lock_guard<std::mutex> lock(answers_mutex);
        const auto                        found = answers.find(key);
        if (found != answers.end()) {
            g_metrics.answered.fetch_add(1, std::memory_order_relaxed);
            return found->second;
        }
    }
    g_metrics.looked_for.fetch_add(1, std::memory_order_relaxed);
    neuron_answer answer;
    answer.selection = select(op);
    answer.member    = groups.has_member(neuron_token_of(op)) ||
                       (!exact_only && !groups.empty() && groups.may_have_member(neuron_signature_of(op)));
    const std::lock_guard<std::mutex> lock(answers_mutex);
    if (answers.size() >= MAX_ANSWERS) {
        answers.clear();
    }
    answers.emplace(key, answer);
    return answer;
}

// Returns what a launch for a node of attention takes.
static double launch_of(const neuron_attention & attention, const neuron_attention_node & node, neuron_sizes sizes) {
    double whole = 0;
    double rows  = 0;
    for (int i = 0; i <= node.signature.n_src; i++) {
        if (node.signature.tensors[i].type == NEURON_KERNELS_ABSENT) {
            continue;
        }
        const auto bytes = (double) neuron_nbytes(attention.piece(node, i, sizes.n, sizes.n_more));
        (node.tokens[i] >= 0 ? rows : whole) += bytes;
    }
    return neuron_costs::get().launch(whole, rows / (double) sizes.n, sizes.n);
}

// Chooses among sizes that have the same columns.
bool neuron_kernel_store::choose(neuron_attention &   attention,
                                 const neuron_sizes * begin,
                                 const neuron_sizes * end) const {
    std::vector<int64_t>                          counts;
    std::vector<double>                           costs;
    std::map<int64_t, std::vector<neuron_kernel>> kernels;
    for (const neuron_sizes * sizes = begin; sizes != end; sizes++) {
        std::vector<neuron_kernel> found;
        double                     cost = 0;
        for (const neuron_attention_node & node : attention.nodes) {
            neuron_signature piece = node.signature;
            for (int i = 0; i <= piece.n_src; i++) {
                piece.tensors[i] = attention.piece(node, i, sizes->n, sizes->n_more);
            }
            const neuron_kernel kernel = find(piece, 0);
            if (!kernel) {
                break;
            }
            found.push_back(kernel);
            cost += launch_of(attention, node, *sizes);
        }
        if (found.size() == attention.nodes.size()) {
            counts.push_back(sizes->n);
            costs.push_back(cost);
            kernels[sizes->n] = std::move(found);
        }
    }
    for (const neuron_range & range : neuron_choose_pieces(attention.cut.n, counts, costs, true)) {
        attention.pieces.push_back({ kernels.at(range.n), range });
    }
    return !attention.pieces.empty();
}

bool neuron_kernel_store::select(neuron_attention & attention) const {
    const ggml_tensor * first = attention.nodes.front().node;
    const auto          found = heads.find(first->ne[2]);
    if (exact_only || found == heads.end()) {
        return false;
    }
    const neuron_sizes * end = found->second.data() + found->second.size();
    for (const neuron_sizes * sizes = found->second.data(); sizes != end;) {
        const neuron_sizes * next =
            std::find_if(sizes, end, [sizes](const neuron_sizes & s) { return s.n_more != sizes->n_more; });
        const bool own    = sizes->n_more == first->ne[0];
        const bool longer = attention.cut.n_more > 0 && sizes->n_more > first->ne[0];
        const bool masked = attention.open || attention.rule.mask >= 0;
        if (longer && (!masked || !has_room(&attention.whole, attention.signature, attention.cut, sizes->n_more))) {
            return false;  // nor for longer ones
        }
        attention.n_more = own ? attention.cut.n_more : sizes->n_more;
        if ((own || longer) && choose(attention, sizes, next)) {
            return true;
        }
        sizes = next;
    }
    return false;
}

std::vector<neuron_kernel> neuron_kernel_store::select_in_attention(const ggml_tensor * op) const {
    std::vector<neuron_kernel> found;
    for (const bool scores : { true, false }) {
        const auto attention = heads.empty() || exact_only ? nullptr : neuron_attention_to(op, scores);
        if (attention && select(*attention)) {
            for (const neuron_attention_piece & piece : attention->pieces) {
                found.insert(found.end(), piece.kernels.begin(), piece.kernels.end());
            }
            break;
        }
    }
    return found;
}
