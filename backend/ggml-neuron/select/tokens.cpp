#include "select/tokens.h"

#include "../../bundle/src/hash.h"
#include "../../bundle/src/key.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "select/token_table.inc"

//
// cutting
//

std::pair<const neuron_token_rule *, const neuron_token_rule *> neuron_token_rules(uint64_t op_hash) {
    using range             = std::pair<const neuron_token_rule *, const neuron_token_rule *>;
    static const auto table = [] {
        std::unordered_map<uint64_t, range> found;
        for (const neuron_token_rule & rule : RULES) {
            range & r = found.emplace(nk::hash_op(rule.op), range{ &rule, &rule }).first->second;
            r.second  = &rule + 1;
        }
        return found;
    }();
    const auto found = table.find(op_hash);
    return found == table.end() ? range{} : found->second;
}

static bool is_absent(const neuron_kernels_tensor & t) {
    return t.type == NEURON_KERNELS_ABSENT;
}

// Returns whether a tensor has one element along each axis from `axis` on.
static bool ends_before(const neuron_kernels_tensor & t, int axis) {
    return std::all_of(t.ne + axis, t.ne + 4, [](int64_t n) { return n == 1; });
}

// Returns whether the tokens of a tensor are contiguous: then consecutive tokens are a range of its bytes.
static bool is_outermost(const neuron_kernels_tensor & t, int axis) {
    neuron_kernels_tensor one = t;
    one.ne[axis]              = 1;
    return t.ne[axis] == 1 || t.nb[axis] >= neuron_nbytes(one);
}

// Cuts along the result's axis. Sources with a bit in `whole` stay whole if they have one element there.
static bool cut_outermost(const neuron_signature & node, int axis, uint32_t whole, neuron_cut & cut) {
    const neuron_kernels_tensor & result = node.tensors[node.n_src];
    cut.n                                = result.ne[axis];
    // the only source of repeat may be the same for all tokens
    bool any                             = cut.rule->broadcast && node.n_src == 1;
    for (int i = 0; i < node.n_src; i++) {
        const neuron_kernels_tensor & t = node.tensors[i];
        cut.axis[i]                     = -1;
        if (is_absent(t) || (cut.rule->broadcast && t.ne[axis] == 1 && (cut.n > 1 || (whole >> i & 1)))) {
            continue;
        }
        if (t.ne[axis] != cut.n || !ends_before(t, axis + 1)) {
            return false;
        }
        cut.axis[i] = (int8_t) axis;
        any         = true;
    }
    cut.axis[node.n_src] = (int8_t) axis;
    return any;
}

// Cuts along the axes that the rule names.
static bool cut_named(const neuron_signature & node, neuron_cut & cut) {
    const neuron_token_rule & rule = *cut.rule;
    const auto                set  = [&](int64_t & n, int64_t ne) {
        const bool fits = n == 0 || n == ne;
        n               = ne;
        return fits;
    };
    if (rule.result >= 0 && !ends_before(node.tensors[node.n_src], rule.result + 1)) {
        return false;
    }
    cut.axis[node.n_src] = rule.result;
    cut.n                = rule.result >= 0 ? node.tensors[node.n_src].ne[rule.result] : 0;
    for (int i = 0; i < node.n_src; i++) {
        const neuron_kernels_tensor & t     = node.tensors[i];
        const bool                    named = i < NEURON_TOKEN_SOURCES;
        cut.axis[i]                         = named ? rule.sources[i] : (int8_t) -1;
        if (is_absent(t)) {
            cut.axis[i] = -1;
            continue;
        }
        if (cut.axis[i] >= 0 && !set(cut.n, t.ne[cut.axis[i]])) {
            return false;
        }
        // the result has the sources' axis of tokens, and no axis behind it has several elements
        if (rule.result < 0 && cut.axis[i] >= 0 && !ends_before(t, cut.axis[i] + 1)) {
            return false;
        }
        if (named && rule.more[i] >= 0 && !set(cut.n_more, t.ne[rule.more[i]])) {
            return false;
        }
    }
    if (rule.mask >= 0 && (rule.mask >= node.n_src || is_absent(node.tensors[rule.mask]))) {
        cut.n_more = -1;  // nothing hides the elements beyond
    }
    return cut.n > 0;
}

static bool cut_along(const neuron_signature & node, int axis, uint32_t whole, neuron_cut & cut) {
    cut.n = cut.n_more = 0;
    if (!(cut.rule->result == neuron_token_rule::OUTERMOST ? cut_outermost(node, axis, whole, cut)
                                                           : cut_named(node, cut))) {
        return false;
    }
    for (int i = 0; i <= node.n_src; i++) {
        if (cut.axis[i] >= 0 && !is_outermost(node.tensors[i], cut.axis[i])) {
            return false;
        }
    }
    return true;
}

neuron_kernels_tensor neuron_cut::piece(const neuron_signature & node,
                                        int                      i,
                                        int64_t                  n_tokens,
                                        int64_t                  n_longer) const {
    neuron_kernels_tensor t = node.tensors[i];
    if (axis[i] >= 0) {
        t.ne[axis[i]] = n_tokens;
    }
    const int longer = more_of(node, i);
    if (!is_absent(t) && longer >= 0 && n_more > 0 && n_longer != n_more) {
        t.ne[longer] = n_longer;
        if (i == rule->mask) {
            neuron_kernels_set_dense(&t);
        }
    }
    return t;
}

size_t neuron_nbytes(const neuron_kernels_tensor & t) {
    const nk::type_traits * type = nk::find_type(t.type);
    if (!type) {
        return 0;
    }
    // like ggml_nbytes: from the first element to the end of the last block
    size_t n =
        type->block == 1 ? type->size + (size_t) (t.ne[0] - 1) * t.nb[0] : (size_t) t.ne[0] * t.nb[0] / type->block;
    for (int i = 1; i < 4; i++) {
        n += (size_t) (t.ne[i] - 1) * t.nb[i];
    }
    return n;
}

neuron_kernels_tensor neuron_tensor_of_words(const uint64_t * words) {
    neuron_kernels_tensor t{};
    t.type = (int32_t) words[0];
    std::copy(words + 1, words + 5, t.ne);
    std::copy(words + 5, words + 9, t.nb);
    return t;
}

size_t neuron_nbytes_of_words(const uint64_t * words) {
    return neuron_nbytes(neuron_tensor_of_words(words));
}

//
// the index
//

// Adds a tensor, except for the numbers that may differ, and for strides that depend on them or have no effect.
static void add_tensor(nk::word_hash & h, const neuron_kernels_tensor & t, int axis, int more) {
    h.add((uint64_t) t.type);
    if (is_absent(t)) {
        return;
    }
    const int outer = std::max(axis, more);
    for (int i = 0; i < 4; i++) {
        const bool open = i == axis || i == more;
        h.add(open ? 0 : (uint64_t) t.ne[i]);
        h.add(open || t.ne[i] == 1 || (more == 0 && i <= outer) ? 0 : t.nb[i]);
    }
}

static uint64_t family(const neuron_signature & s, const neuron_cut & cut) {
    nk::word_hash h;
    h.add((uint64_t) (cut.rule - RULES));
    h.add((uint64_t) s.n_src << 32 | (uint32_t) s.alias);
    h.add(s.op_hash);
    for (int i = 0; i <= s.n_src; i++) {
        h.add((uint64_t) cut.axis[i]);
        add_tensor(h, s.tensors[i], cut.axis[i], cut.more_of(s, i));
    }
    for (int i = 0; i < NEURON_KERNELS_N_OP_PARAMS; i++) {
        h.add(s.op_params ? (uint32_t) s.op_params[i] : 0);
    }
    return h.value();
}

// Calls `use` for each way to cut a signature, until it returns true; an axis of several elements comes first. With one
// token, several axes may be the tokens' axis, and a source with one row may be whole or not.
template <typename F> static void for_each_cut(const neuron_signature & s, F use) {
    const auto rules = neuron_token_rules(s.op_hash);
    for (const neuron_token_rule * rule = rules.first; rule != rules.second; rule++) {
        neuron_cut cut;
        cut.rule = rule;
        if (rule->result != neuron_token_rule::OUTERMOST) {
            if (cut_along(s, -1, 0, cut) && use(cut)) {
                return;
            }
            continue;
        }
        const neuron_kernels_tensor & result = s.tensors[s.n_src];
        int                           axis   = 3;
        while (axis > 1 && result.ne[axis] == 1) {
            axis--;
        }
        for (; axis < 4; axis++) {
            const uint32_t ways = rule->broadcast && result.ne[axis] == 1 ? 1u << s.n_src : 1;
            for (uint32_t whole = 0; whole < ways; whole++) {
                if (cut_along(s, axis, whole, cut) && use(cut)) {
                    return;
                }
            }
        }
    }
}

void neuron_add_sizes(std::vector<neuron_sizes> & found, const neuron_sizes & added) {
    const auto less = [](const neuron_sizes & a, const neuron_sizes & b) {
        return a.n_more != b.n_more ? a.n_more < b.n_more : a.n < b.n;
    };
    const auto at = std::lower_bound(found.begin(), found.end(), added, less);
    if (at == found.end() || less(added, *at)) {
        found.insert(at, added);
    }
}

void neuron_token_index::add(const neuron_signature & kernel, const neuron_bundle * bundle, int32_t number) {
    for_each_cut(kernel, [&](const neuron_cut & cut) {
        neuron_add_sizes(sizes[family(kernel, cut)], { cut.n, cut.n_more, bundle, number });
        return false;
    });
}

const std::vector<neuron_sizes> * neuron_token_index::find(const neuron_signature & node, neuron_cut & cut) const {
    const std::vector<neuron_sizes> * found = nullptr;
    for_each_cut(node, [&](const neuron_cut & way) {
        const auto at = sizes.find(family(node, way));
        if (at == sizes.end()) {
            return false;
        }
        found = &at->second;
        cut   = way;
        return true;
    });
    return found;
}

int64_t neuron_token_index::fewer_cells(const neuron_signature & node) const {
    neuron_cut                        cut;
    const std::vector<neuron_sizes> * kernels = find(node, cut);
    return kernels && cut.rule->mask >= 0 && kernels->back().n_more < cut.n_more ? kernels->back().n_more : 0;
}

// Returns a node's number of streams: sequences that are computed together, in dimension 3.
static int64_t n_streams(const neuron_signature & node) {
    int64_t n = node.tensors[node.n_src].ne[3];
    for (int i = 0; i < node.n_src; i++) {
        n = is_absent(node.tensors[i]) ? n : std::max(n, node.tensors[i].ne[3]);
    }
    return n;
}

int64_t neuron_split_streams(const neuron_signature & node, neuron_signature & one) {
    const auto    rules = neuron_token_rules(node.op_hash);
    const int64_t n     = node.tensors[node.n_src].ne[3];
    if (n == 1 || rules.first == rules.second || !rules.first->streams) {
        return 1;
    }
    one = node;
    for (int i = 0; i <= node.n_src; i++) {
        neuron_kernels_tensor & t = one.tensors[i];
        if (is_absent(t) || t.ne[3] == 1) {
            continue;
        }
        if (t.ne[3] != n) {
            return 1;
        }
        t.ne[3] = 1;
    }
    return n;
}

std::string neuron_why_not_cut(const neuron_signature & node) {
    neuron_signature one;
    if (neuron_split_streams(node, one) > 1) {
        return neuron_why_not_cut(one);
    }
    const auto rules = neuron_token_rules(node.op_hash);
    if (rules.first == rules.second) {
        const bool recurrent = std::any_of(std::begin(RECURRENT), std::end(RECURRENT),
                                           [&](const char * op) { return nk::hash_op(op) == node.op_hash; });
        return recurrent ? "what it computes runs along the tokens" : "this op has no dimension of tokens";
    }
    bool any = false;
    for_each_cut(node, [&](const neuron_cut &) { return any = true; });
    if (any) {
        return "";
    }
    if (n_streams(node) > 1) {
        return "it has " + std::to_string(n_streams(node)) + " streams";
    }
    const bool rotates = rules.first->sources[1] == 0 && rules.first->result == 2;
    if (rotates && node.n_src > 1 && node.tensors[1].ne[0] != node.tensors[node.n_src].ne[2]) {
        return "its positions have several dimensions";
    }
    return "its tokens are not in its outermost dimension";
}

//
// pieces
//

namespace {

// Several pieces with the same number of tokens.
struct run_of_pieces {
    int64_t n     = 0;
    int64_t count = 0;
    double  cost  = std::numeric_limits<double>::infinity();
};

// The possible last n tokens: equal pieces behind other pieces.
class last_pieces {
  public:
    last_pieces(int64_t n, const std::vector<int64_t> & counts, const std::vector<double> & costs, bool again) :
        counts(counts), costs(costs), again(again),
        cheapest((size_t) (std::upper_bound(counts.begin(), counts.end(), n) - counts.begin())) {
        for (size_t i = cheapest.size(); i-- > 0;) {
            const bool last = i + 1 == cheapest.size();
            cheapest[i]     = last || costs[i] <= costs[cheapest[i + 1]] ? i : cheapest[i + 1];
        }
    }

    // Returns the best pieces for the last r tokens. The last piece begins early if rows may be computed twice. For
    // each number of pieces it examines only the cheapest size that is large enough. If fewer pieces of that size
    // suffice, the loop also finds these.
    run_of_pieces best(int64_t r) const {
        run_of_pieces found;
        for (int64_t count = NEURON_MAX_PIECES; count > 0; count--) {
            const int64_t least = (r + count - 1) / count;
            size_t        i     = (size_t) (std::lower_bound(counts.begin(), counts.end(), least) - counts.begin());
            if (i >= cheapest.size() || (!again && counts[i] * count != r)) {
                continue;
            }
            i                 = again ? cheapest[i] : i;
            const double cost = (double) count * costs[i];
            if (cost < found.cost) {
                found = { counts[i], count, cost };
            }
        }
        return found;
    }

  private:
    const std::vector<int64_t> & counts;
    const std::vector<double> &  costs;
    const bool                   again;
    std::vector<size_t>          cheapest;  // cheapest of counts[i..], for counts up to n
};

}  // namespace

// Returns pieces of all sizes, largest first, as many of each as possible; none if tokens are left over.
static std::vector<neuron_range> descending_pieces(int64_t n, const std::vector<int64_t> & counts) {
    std::vector<neuron_range> pieces;
    int64_t                   begin = 0;
    for (auto count = counts.rbegin(); count != counts.rend(); ++count) {
        while (n - begin >= *count) {
            if (pieces.size() == NEURON_MAX_IN_PLACE) {
                return {};
            }
            pieces.push_back({ begin, *count });
            begin += *count;
        }
    }
    return begin == n ? pieces : std::vector<neuron_range>();
}

std::vector<neuron_range> neuron_choose_pieces(int64_t                      n,
                                               const std::vector<int64_t> & counts,
                                               const std::vector<double> &  costs,
                                               bool                         again) {
    const last_pieces last(n, counts, costs, again);
    run_of_pieces     first;
    run_of_pieces     rest;
    double            best = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < counts.size(); i++) {
        const int64_t whole = std::max<int64_t>(n / counts[i], 1);
        const int64_t left  = n - whole * counts[i];
        double        cost  = (double) whole * costs[i];
        if (cost >= best || whole > NEURON_MAX_PIECES) {
            continue;
        }
        run_of_pieces then;
        if (left > 0) {
            then = last.best(left);
            cost += then.cost;
        }
        if (cost < best && whole + then.count <= NEURON_MAX_PIECES) {
            best  = cost;
            first = { counts[i], whole, cost };
            rest  = then;
        }
    }
    std::vector<neuron_range> pieces;
    pieces.reserve((size_t) (first.count + rest.count));
    for (int64_t i = 0; i < first.count; i++) {
        pieces.push_back({ i * first.n, first.n });
    }
    for (int64_t i = 0; i < rest.count; i++) {
        pieces.push_back({ std::min(first.count * first.n + i * rest.n, n - rest.n), rest.n });
    }
    return pieces.empty() && !again ? descending_pieces(n, counts) : pieces;
}

std::vector<neuron_range> neuron_choose_pieces(int64_t                              n,
                                               std::vector<int64_t>                 counts,
                                               std::vector<double>                  costs,
                                               bool                                 again,
                                               const std::function<bool(int64_t)> & has) {
    while (true) {
        std::vector<neuron_range> pieces  = neuron_choose_pieces(n, counts, costs, again);
        int64_t                   lacking = 0;
        int64_t                   known   = 0;  // equal ones are adjacent
        for (auto piece = pieces.begin(); piece != pieces.end() && !lacking; ++piece) {
            lacking = piece->n != known && !has(piece->n) ? piece->n : 0;
            known   = piece->n;
        }
        if (!lacking) {
            return pieces;
        }
        const auto at = std::find(counts.begin(), counts.end(), lacking);
        costs.erase(costs.begin() + (at - counts.begin()));
        counts.erase(at);
    }
}

//
// matrices
//

std::vector<uint8_t> neuron_widen(const ggml_tensor * matrix, const uint8_t * data, const neuron_wider & wider) {
    const size_t         element = ggml_type_size(matrix->type);
    const int64_t        own     = wider.own ? wider.own : matrix->ne[0];
    const int64_t        n_rows  = wider.own ? ggml_nelements(matrix) / own : matrix->ne[1];
    const size_t         stride  = wider.own ? (size_t) own * element : matrix->nb[1];
    const float          masked  = -INFINITY;
    const ggml_fp16_t    half    = 0xFC00;  // the same in F16
    const uint32_t       zero    = 0;
    const void *         hiding  = matrix->type == GGML_TYPE_F16 ? (const void *) &half : &masked;
    const void *         filler  = wider.fill == neuron_fill::HIDE ? hiding : &zero;
    std::vector<uint8_t> made((size_t) (wider.rows * wider.columns) * element);
    for (int64_t r = 0; r < wider.rows; r++) {
        uint8_t * to = made.data() + (size_t) (r * wider.columns) * element;
        memcpy(to, data + (size_t) (r % n_rows) * stride, (size_t) own * element);
        for (int64_t c = own; c < wider.columns; c++) {
            const void * from = wider.fill == neuron_fill::REPEAT ? to + (size_t) (c - own) * element : filler;
            memcpy(to + (size_t) c * element, from, element);
        }
    }
    return made;
}
