// Chooses the kernels that compute a node with any number of tokens and any length of the cache.

#include "../../bundle/src/hash.h"
#include "../../bundle/src/key.h"
#include "report/metrics.h"
#include "select/costs.h"
#include "select/kernel_store.h"
#include "select/numbers.h"
#include "select/tensors.h"
#include "select/unfused_attention.h"
#include "weights/layouts.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <utility>

bool neuron_group::has_room() const {
    return std::all_of(slots.begin(), slots.end(), [](const neuron_group_slot & slot) {
        return !slot.goes_on() ||
               neuron_offset_of(slot.tensor) + slot.offset + slot.room.size <= neuron_room_of(slot.tensor);
    });
}

std::vector<neuron_kernel> neuron_group::kernels() const {
    std::vector<neuron_kernel> found;
    for (const neuron_group_piece & piece : pieces) {
        found.push_back(piece.kernel);
    }
    return found;
}

// Sets the rooms of a group for the kernels of its pieces, whose cache has length n_more. The group is a single node or
// attention.
static void fit(const neuron_signature & node, const neuron_cut & cut, int64_t n_more, neuron_group & group) {
    group.other   = true;
    group.n_rows  = cut.rule->written >= 0 && n_more < cut.n_more ? n_more : 0;
    group.rows    = cut.n;  // more when the only piece has more
    group.padding = -cut.n;
    for (const neuron_group_piece & piece : group.pieces) {
        group.rows = std::max(group.rows, piece.range.n);
        group.padding += piece.between ? 0 : piece.range.n;
    }
    for (int i = 0; i <= node.n_src; i++) {
        if (node.tensors[i].type == NEURON_KERNELS_ABSENT) {
            continue;
        }
        const neuron_kernels_tensor whole = cut.piece(node, i, group.rows, n_more);
        const size_t                size  = neuron_nbytes(whole);
        const size_t                row   = cut.axis[i] >= 0 ? whole.nb[cut.axis[i]] : 0;
        if (i == node.n_src) {
            group.results.push_back({ nullptr, size, row, group.pieces.front().kernel.alias });
            continue;
        }
        neuron_group_slot & slot = group.slots[(size_t) i];
        slot.row                 = row;
        if (i == cut.rule->written && n_more < cut.n_more) {
            slot.size = size;
        } else if (i == cut.rule->mask && cut.n_more > 0 && n_more != cut.n_more) {
            slot.room.kind  = neuron_group_room::WIDER;
            slot.room.size  = size;
            slot.room.wider = { n_more, group.rows };
        } else if (size != neuron_nbytes(node.tensors[i])) {
            const bool cells = !row && (cut.rule->mask >= 0 || i == cut.rule->written);
            slot.room = { cells ? neuron_group_room::CELLS : neuron_group_room::ROWS, size, (size_t) cut.n * row };
        }
    }
}

// Returns the bytes that a launch reads for any number of tokens, and the bytes of all tokens' rows.
//
// tokens  the tokens' axis of each source and then the result, or -1
// bytes   returns the bytes of one of these tensors
template <typename F>
static std::pair<double, double> traffic(const neuron_signature & node, const int8_t * tokens, F bytes) {
    double whole = 0;
    double rows  = 0;
    for (int i = 0; i <= node.n_src; i++) {
        if (node.tensors[i].type == NEURON_KERNELS_ABSENT) {
            continue;
        }
        if (tokens[i] >= 0) {
            rows += (double) bytes(i);
        } else if (i < node.n_src && i != node.alias) {  // a kernel does not read the tensor that it writes
            whole += (double) bytes(i);
        }
    }
    return { whole, rows };
}

// Chooses the kernels for a node or attention: for its exact length, else for the next longer one that has kernels and
// room. Returns whether there are any.
//
// longer  whether a longer cache is allowed
// again   whether rows may be computed twice
// cost    returns the price of a launch for each of some sizes
// find    returns their kernels, as pieces; none when one is missing
template <typename C, typename F>
static bool choose(const neuron_signature &          node,
                   const neuron_cut &                cut,
                   const std::vector<neuron_sizes> & sizes,
                   bool                              longer,
                   bool                              again,
                   C                                 cost,
                   F                                 find,
                   neuron_group &                    group) {
    for (auto begin = sizes.begin(), end = begin; begin != sizes.end();
         begin = end) {  // ascending in n_more, then in n
        const int64_t n_more = begin->n_more;
        end = std::find_if(begin, sizes.end(), [n_more](const neuron_sizes & s) { return s.n_more != n_more; });
        if (n_more < cut.n_more && cut.rule->written < 0) {
            continue;
        }
        if (n_more > cut.n_more && !longer) {
            return false;
        }
        std::vector<int64_t>                               counts;
        std::vector<double>                                costs;
        std::map<int64_t, std::vector<neuron_group_piece>> found;
        counts.reserve((size_t) (end - begin));
        costs.reserve((size_t) (end - begin));
        for (auto s = begin; s != end; ++s) {
            counts.push_back(s->n);
            costs.push_back(cost(*s));
        }
        const auto has = [&](int64_t n) {
            return !(found[n] = find(*std::find_if(begin, end, [n](const neuron_sizes & s) { return s.n == n; })))
                        .empty();
        };
        for (const neuron_range & range :
             neuron_choose_pieces(cut.n, std::move(counts), std::move(costs), again, has)) {
            for (neuron_group_piece piece : found.at(range.n)) {
                piece.range = range;
                group.pieces.push_back(std::move(piece));
            }
        }
        if (group) {
            fit(node, cut, n_more, group);
            return group.has_room();
        }
    }
    return false;
}

// Returns whether a kernel's tensor equals a node's; strides of one element mean nothing.
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

// Returns whether a kernel's sizes are for a piece of the node. Kernels with other strides of the tokens' axis have the
// same hash.
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

// Returns the kernel for a piece of a node, or an empty one.
neuron_kernel neuron_kernel_store::find_piece(const neuron_sizes &     s,
                                              const neuron_signature & node,
                                              const neuron_cut &       cut) const {
    if (is_piece(s, node, cut)) {
        return { s.bundle, s.number, node.alias };
    }
    neuron_signature piece = node;
    for (int i = 0; i <= node.n_src; i++) {
        piece.tensors[i] = cut.piece(node, i, s.n, s.n_more);
    }
    return find(piece);
}

// Returns the kernels for all streams of a node, one after the other, from the kernels for the first one. Returns
// nothing when another stream has no room.
static neuron_group each_stream(const neuron_signature & node,
                                const neuron_signature & one,
                                int64_t                  n_streams,
                                const neuron_group &     first) {
    neuron_group group = first;
    group.other        = true;
    group.padding      = n_streams * first.padding;
    group.slots.clear();
    group.results.clear();
    group.pieces.clear();
    for (int64_t stream = 0; stream < n_streams; stream++) {
        const auto offset = [&](int i) {
            return node.tensors[i].ne[3] == n_streams ? (size_t) stream * node.tensors[i].nb[3] : 0;
        };
        std::vector<int> inputs;
        for (int i = 0; i < node.n_src; i++) {
            inputs.push_back((int) group.slots.size());
            group.slots.push_back(first.slots[(size_t) i]);
            if (one.tensors[i].type != NEURON_KERNELS_ABSENT) {
                group.slots.back().offset = offset(i);
                group.slots.back().size   = neuron_nbytes(one.tensors[i]);
            }
        }
        group.results.push_back(first.results.front());
        group.results.back().offset = offset(node.n_src);
        group.results.back().own    = neuron_nbytes(one.tensors[node.n_src]);
        for (neuron_group_piece piece : first.pieces) {
            piece.inputs = inputs;
            piece.result = (int) stream;
            group.pieces.push_back(std::move(piece));
        }
    }
    return group.has_room() ? group : neuron_group{};
}

// Adds a slot with the node's numbers to its group if its kernels are for any numbers.
static neuron_group with_numbers(neuron_group group) {
    if (group) {
        group.slots.emplace_back();
        group.slots.back().numbers = { 0 };
    }
    return group;
}

neuron_group neuron_kernel_store::select(const ggml_tensor * op) const {
    if (bundles.empty()) {
        return {};
    }
    neuron_signature    node  = neuron_unhashed_signature_of(op);
    neuron_group        group = select_exact(op, node);
    const bool          opens = !group && neuron_has_numbers(op);
    const neuron_params open  = neuron_open_params_of(op);
    neuron_signature    any   = node;
    any.op_params             = (const int32_t *) open.data();
    if (opens) {
        group = with_numbers(select_exact(op, any));
    }
    if (!group) {
        group = select_pieces(op, node);
    }
    if (!group && opens) {
        group = with_numbers(select_pieces(op, any));
    }
    neuron_signature one;
    const int64_t    n_streams = group || exact_only ? 1 : neuron_split_streams(node, one);
    if (n_streams > 1) {
        group = select_exact(op, one);
        group = group ? group : select_pieces(op, one);
        group = group ? each_stream(node, one, n_streams, group) : group;
    }
    return group || exact_only ? group : select_laid_out(op, node);
}

// Sets the slots of a single node's group.
static void take_sources(const ggml_tensor * op, const neuron_signature & node, neuron_group & group) {
    group.slots.reserve((size_t) node.n_src + 1);
    for (int i = 0; i < node.n_src; i++) {
        group.slots.push_back({ op->src[i], 0, op->src[i] ? ggml_nbytes(op->src[i]) : 0 });
        group.slots.back().source = (size_t) i;
    }
}

// Returns the kernel for exactly this node.
neuron_group neuron_kernel_store::select_exact(const ggml_tensor * op, const neuron_signature & node) const {
    neuron_group group;
    if (const neuron_kernel exact = find(node)) {
        take_sources(op, node, group);
        for (uint32_t updates = neuron_updates_of(op), i = 0; updates >> i; i++) {
            group.slots[i].written = updates >> i & 1;
        }
        group.results.push_back({ nullptr, 0, 0, exact.alias });
        group.pieces.push_back({ exact });
    }
    return group;
}

// Returns the kernel for larger tensors for which a node is laid out. Its op_hash must be set.
neuron_group neuron_kernel_store::select_laid_out(const ggml_tensor * op, const neuron_signature & node) const {
    neuron_group          group;
    neuron_layout_of_node layout;
    const neuron_kernel   kernel = laid_out.find(op, node, layout);
    if (!kernel) {
        return group;
    }
    const auto made = [&](int i) {
        const neuron_laid & laid = layout[(size_t) i];
        return laid.kernel.type == NEURON_KERNELS_ABSENT ? nullptr : std::make_shared<const neuron_laid>(laid);
    };
    take_sources(op, node, group);
    for (int i = 0; i < node.n_src; i++) {
        group.slots[(size_t) i].laid = made(i);
    }
    group.results.push_back({ nullptr, 0, 0, kernel.alias });
    group.results.back().laid = made(node.n_src);
    group.pieces.push_back({ kernel });
    group.other = group.laid_out = true;
    if (group.results.back().laid) {
        const neuron_kernels_tensor & t = group.results.back().laid->kernel;
        group.padding                   = t.ne[1] * t.ne[2] * t.ne[3] - ggml_nrows(op);
    }
    return group;
}

// Returns kernels for other numbers of tokens that compute a node, and sets its op_hash.
neuron_group neuron_kernel_store::select_pieces(const ggml_tensor * op, neuron_signature & node) const {
    neuron_group group;
    node.op_hash = nk::hash_op(node.op);
    neuron_cut                        cut;
    const std::vector<neuron_sizes> * sizes = exact_only ? nullptr : tokens.find(node, cut);
    if (!sizes) {
        return group;
    }
    take_sources(op, node, group);
    std::pair<double, double> bytes;
    int64_t                   of   = -2;  // no length
    const auto                cost = [&](const neuron_sizes & s) {
        if (s.n_more != of) {
            of    = s.n_more;
            bytes = traffic(node, cut.axis, [&](int i) {
                const bool table = cut.axis[i] < 0 && cut.more(i) >= 0 && cut.rule->mask < 0;
                return table ? 0
                             : neuron_nbytes(cut.piece(node, i, 1, of));  // a kernel reads only some rows of a table
            });
        }
        return neuron_costs::get().launch(bytes.first, bytes.second, s.n);
    };
    const auto find_it = [&](const neuron_sizes & s) {
        std::vector<neuron_group_piece> pieces;
        if (const neuron_kernel kernel = find_piece(s, node, cut)) {
            pieces.push_back({ kernel });
        }
        return pieces;
    };
    const bool again = node.alias == NEURON_KERNELS_NO_ALIAS || node.is_in_place_only;
    if (cut.rule->written < 0) {
        return choose(node, cut, *sizes, true, again, cost, find_it, group) ? group : neuron_group{};
    }
    const neuron_group sources = group;
    auto               end =
        std::find_if(sizes->begin(), sizes->end(), [&](const neuron_sizes & s) { return s.n_more >= cut.n_more; });
    if (choose(node, cut, { end, sizes->end() }, true, again, cost, find_it, group)) {
        return group;
    }
    // else kernels with fewer rows, in descending order: the written rows may be among them
    while (end != sizes->begin()) {
        const int64_t n_more = std::prev(end)->n_more;
        const auto    begin  = std::find_if(sizes->begin(), end, [&](const auto & s) { return s.n_more == n_more; });
        group                = sources;
        if (choose(node, cut, { begin, end }, false, again, cost, find_it, group)) {
            return group;
        }
        end = begin;
    }
    return {};
}

// The most cached answers: the nodes of some graphs of a model with several hundred different ones.
static constexpr size_t MAX_ANSWERS = 1 << 13;

// Sets `key` to all inputs of an answer: the node's op and tensors, and how far kernels may read beyond views.
static void set_answer_key(const ggml_tensor * op, std::vector<uint64_t> & key) {
    const int  n_src      = neuron_n_src(op);
    const auto add_tensor = [&key](const ggml_tensor * t) {
        key.push_back((uint64_t) neuron_type_of(t));
        for (int i = 0; i < GGML_MAX_DIMS; i++) {
            key.push_back((uint64_t) t->ne[i]);
            key.push_back(t->nb[i]);
        }
        key.push_back(neuron_offset_of(t) << 1 | (uint64_t) neuron_is_of_call(t));
        key.push_back(neuron_room_of(t));
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

std::shared_ptr<const neuron_answer> neuron_kernel_store::answer(const ggml_tensor * op) const {
    static const auto nothing = std::make_shared<const neuron_answer>();
    if (bundles.empty()) {
        return nothing;
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
    const bool member = groups.has_member(op) || (!exact_only && !groups.empty() &&
                                                  (groups.may_have_member(op) || groups.may_have_shorter_member(op)));
    const auto answer = std::make_shared<neuron_answer>(neuron_answer{ select(op), member });
    for (neuron_group_slot & slot : answer->group.slots) {
        slot.tensor = nullptr;
    }
    const std::lock_guard<std::mutex> lock(answers_mutex);
    if (answers.size() >= MAX_ANSWERS) {
        answers.clear();
    }
    answers.emplace(key, answer);
    return answer;
}

int64_t neuron_kernel_store::fewer_cells(const ggml_tensor * op) const {
    if (exact_only || op->op != GGML_OP_FLASH_ATTN_EXT) {
        return 0;
    }
    const neuron_signature   node = neuron_signature_of(op);
    neuron_signature         one;
    const neuron_signature & stream = neuron_split_streams(node, one) > 1 ? one : node;
    return std::max(tokens.fewer_cells(stream), groups.fewer_cells(stream));
}

// Extends the kernels for the first stream of attention to all streams, one after the other. Returns false when another
// stream has no room.
static bool repeat_for_streams(neuron_attention & attention) {
    const neuron_group first = attention.group;
    neuron_group &     group = attention.group;
    const int          n_src = attention.signature.n_src;
    group.padding *= attention.n_streams;
    for (int64_t stream = 1; stream < attention.n_streams; stream++) {
        const auto n_slots = (int) group.slots.size();
        group.slots.insert(group.slots.end(), first.slots.begin(), first.slots.end());
        for (int i = 0; i < n_src; i++) {
            group.slots[(size_t) (n_slots + i)].offset = (size_t) stream * attention.strides[i];
        }
        group.results.push_back(first.results.front());
        group.results.back().offset = (size_t) stream * attention.strides[n_src];
        for (neuron_group_piece piece : first.pieces) {
            for (int & input : piece.inputs) {
                input += input < 0 ? 0 : n_slots;
            }
            piece.result = (int) stream;
            group.pieces.push_back(std::move(piece));
        }
    }
    for (size_t i = 0; i < first.pieces.size(); i++) {
        group.pieces[i].result = 0;
    }
    for (neuron_group_result & result : group.results) {
        result.own = attention.strides[n_src];
    }
    return group.has_room();
}

bool neuron_kernel_store::select(neuron_attention & attention) const {
    const auto found = heads.find(attention.nodes.front().node->ne[2]);
    if (exact_only || found == heads.end()) {
        return false;
    }
    const auto cost = [&](const neuron_sizes & sizes) {
        double sum = 0;
        for (const neuron_attention_node & node : attention.nodes) {
            const auto [whole, rows] = traffic(node.signature, node.tokens, [&](int i) {
                return neuron_nbytes(attention.piece(node, i, sizes.n, sizes.n_more));
            });
            sum += neuron_costs::get().launch(whole, rows / (double) sizes.n, sizes.n);
        }
        return sum;
    };
    const size_t n_slots  = attention.group.slots.size();
    const auto   find_all = [&](const neuron_sizes & sizes) {
        std::vector<neuron_group_piece> pieces;
        auto                            slot = (int) n_slots;
        for (const neuron_attention_node & node : attention.nodes) {
            neuron_signature piece = node.signature;
            std::vector<int> inputs(node.sources, node.sources + piece.n_src);
            for (int i = 0; i <= piece.n_src; i++) {
                piece.tensors[i] = attention.piece(node, i, sizes.n, sizes.n_more);
            }
            neuron_kernel       kernel = find(piece);
            const neuron_params open   = neuron_open_params_of(node.node);
            if (!kernel && neuron_has_numbers(node.node)) {
                piece.op_params = (const int32_t *) open.data();
                kernel          = find(piece);
                inputs.push_back(slot);
            }
            slot += neuron_has_numbers(node.node);
            if (!kernel) {
                return std::vector<neuron_group_piece>();
            }
            const bool last = &node == &attention.nodes.back();
            pieces.push_back({ kernel, {}, std::move(inputs), last ? 0 : neuron_nbytes(piece.tensors[piece.n_src]) });
        }
        return pieces;
    };
    if (!choose(attention.signature, attention.cut, found->second, attention.rule.mask >= 0, true, cost, find_all,
                attention.group)) {
        return false;
    }
    for (size_t i = 0; i < attention.nodes.size(); i++) {
        if (neuron_has_numbers(attention.nodes[i].node)) {
            attention.group.slots.emplace_back();
            attention.group.slots.back().numbers = { (int) i };
        }
    }
    return attention.n_streams == 1 || repeat_for_streams(attention);
}

std::vector<neuron_kernel> neuron_kernel_store::select_in_attention(const ggml_tensor * op) const {
    for (const bool scores : { true, false }) {
        const auto attention = heads.empty() || exact_only ? nullptr : neuron_attention_to(op, scores);
        if (attention && select(*attention)) {
            return attention->group.kernels();
        }
    }
    return {};
}
