// A layer of a transformer with any number of tokens, computed by kernels for other numbers.

#include "../values.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"
#include "scenario.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int64_t EMBD   = 128;
constexpr int64_t HEAD   = 32;
constexpr int64_t KV     = 2 * HEAD;
constexpr int64_t CELLS  = 256;
constexpr int64_t VOCAB  = 40;
constexpr int64_t EXPERT = 3;

// A call: `n` tokens behind `past` earlier ones. It reads `n_kv` cells of the cache and returns logits of the last
// `n_out` tokens.
struct call {
    int64_t n;
    int64_t past;
    int64_t n_kv;
    int64_t n_out;
    bool    quantized = false;  // the cache is Q8_0; without flash attention only the keys are, and scores are capped
    bool    flash     = true;   // with flash attention; without it values are in rows of cells
    int64_t n_seqs    = 1;      // sequences, whose tokens alternate
    int64_t window    = CELLS;  // the number of positions, including its own, that a token attends to
    bool    blind     = false;  // the last token attends to nothing

    bool is_cell_quantized(int i) const { return quantized && (flash || i == 0); }

    bool is_transposed(int i) const { return !flash && i == 1; }
};

struct layer {
    ggml_tensor *              result;
    ggml_tensor *              cells[2];
    ggml_tensor *              ids;
    ggml_tensor *              positions;
    ggml_tensor *              rows;
    ggml_tensor *              value_rows = nullptr;  // element numbers of writes to transposed values
    ggml_tensor *              scores     = nullptr;  // the results of SOFT_MAX
    ggml_tensor *              mask;
    ggml_tensor *              out_ids;
    ggml_tensor *              experts;
    std::vector<ggml_tensor *> weights;
};

static ggml_tensor * seen(ggml_context * ctx, ggml_tensor * cells, const call & c) {
    const size_t head = ggml_row_size(cells->type, HEAD);
    return ggml_view_3d(ctx, cells, HEAD, c.n_kv, KV / HEAD, cells->nb[1], head, 0);
}

static ggml_tensor * with_flash_attention(ggml_context * ctx,
                                          layer &        l,
                                          const call &   c,
                                          ggml_tensor *  q,
                                          ggml_tensor *  k,
                                          ggml_tensor *  v) {
    v = ggml_set_rows(ctx, l.cells[1], v, l.rows);
    return ggml_flash_attn_ext(ctx, q, seen(ctx, k, c), seen(ctx, v, c), l.mask, 0.01f, 0.0f, 0.0f);
}

static ggml_tensor * without_flash_attention(ggml_context * ctx,
                                             layer &        l,
                                             const call &   c,
                                             ggml_tensor *  q,
                                             ggml_tensor *  k,
                                             ggml_tensor *  v,
                                             ggml_tensor *  sinks) {
    l.value_rows = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, c.n * KV);
    v = ggml_set_rows(ctx, ggml_reshape_2d(ctx, l.cells[1], 1, CELLS * KV), ggml_reshape_2d(ctx, v, 1, c.n * KV),
                      l.value_rows);
    ggml_tensor * t = ggml_mul_mat(ctx, seen(ctx, k, c), q);
    if (c.quantized) {
        t = ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, t, 0.05f)), 20.0f);
    }
    t = ggml_soft_max_ext(ctx, t, l.mask, 0.01f, 0.0f);
    ggml_soft_max_add_sinks(t, c.quantized ? sinks : nullptr);
    l.scores          = t;
    const size_t cell = ggml_type_size(v->type);
    v                 = ggml_view_3d(ctx, v, c.n_kv, HEAD, KV / HEAD, CELLS * cell, CELLS * HEAD * cell, 0);
    t                 = ggml_permute(ctx, ggml_mul_mat(ctx, v, t), 0, 2, 1, 3);
    return ggml_cont_2d(ctx, t, EMBD, c.n);
}

// A transformer's layer with embedding and output, and with experts.
static layer build(ggml_context * ctx, const call & c) {
    layer      l;
    const auto weight = [&](int64_t ne0, int64_t ne1, int64_t ne2 = 1, ggml_type type = GGML_TYPE_F16) {
        l.weights.push_back(ggml_new_tensor_3d(ctx, type, ne0, ne1, ne2));
        return l.weights.back();
    };
    l.ids       = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, c.n);
    l.positions = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, c.n);
    l.rows      = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, c.n);
    l.out_ids   = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, c.n_out);
    l.experts   = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 2, c.n);
    l.mask      = ggml_new_tensor_2d(ctx, c.flash ? GGML_TYPE_F16 : GGML_TYPE_F32, c.n_kv, c.n);
    for (int i = 0; i < 2; i++) {
        const ggml_type type = c.is_cell_quantized(i) ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
        l.cells[i] =
            c.is_transposed(i) ? ggml_new_tensor_2d(ctx, type, CELLS, KV) : ggml_new_tensor_2d(ctx, type, KV, CELLS);
    }
    ggml_tensor * embd = ggml_get_rows(ctx, weight(EMBD, VOCAB), l.ids);
    ggml_tensor * norm = ggml_mul(ctx, ggml_rms_norm(ctx, embd, 1e-5f), weight(EMBD, 1, 1, GGML_TYPE_F32));
    const auto    rope = [&](ggml_tensor * t) {
        t = ggml_reshape_3d(ctx, t, HEAD, t->ne[0] / HEAD, c.n);
        return ggml_rope_ext(ctx, t, l.positions, nullptr, HEAD, 0, 0, 10000.0f, 1.0f, 0.0f, 1.0f, 32.0f, 1.0f);
    };
    ggml_tensor * q    = rope(ggml_mul_mat(ctx, weight(EMBD, EMBD, 1, GGML_TYPE_Q8_0), norm));
    ggml_tensor * k    = rope(ggml_mul_mat(ctx, weight(EMBD, KV), norm));
    ggml_tensor * v    = ggml_mul_mat(ctx, weight(EMBD, KV), norm);
    k                  = ggml_set_rows(ctx, l.cells[0], ggml_reshape_2d(ctx, k, KV, c.n), l.rows);
    q                  = ggml_permute(ctx, q, 0, 2, 1, 3);
    ggml_tensor * t    = c.flash ? with_flash_attention(ctx, l, c, q, k, v)
                                 : without_flash_attention(ctx, l, c, q, k, v, weight(4, 1, 1, GGML_TYPE_F32));
    t                  = ggml_add(ctx, ggml_mul_mat(ctx, weight(EMBD, EMBD), ggml_reshape_2d(ctx, t, EMBD, c.n)), embd);
    ggml_tensor * rows = ggml_reshape_3d(ctx, t, EMBD, 1, c.n);
    ggml_tensor * ffn  = ggml_mul_mat_id(ctx, weight(EMBD, EMBD, EXPERT), rows, l.experts);
    ffn = ggml_silu_inplace(ctx, ggml_add_id(ctx, ffn, weight(EMBD, EXPERT, 1, GGML_TYPE_F32), l.experts));
    ggml_tensor * one = ggml_view_2d(ctx, ffn, EMBD, c.n, ffn->nb[2], 0);
    ggml_tensor * two = ggml_view_2d(ctx, ffn, EMBD, c.n, ffn->nb[2], ffn->nb[1]);
    t                 = ggml_add(ctx, t, ggml_add(ctx, one, two));
    t                 = ggml_swiglu_split(ctx, ggml_mul_mat(ctx, weight(EMBD, EMBD), t), t);
    l.result          = ggml_mul_mat(ctx, weight(EMBD, VOCAB), ggml_get_rows(ctx, t, l.out_ids));
    return l;
}

// Sets a tensor to numbers that its type can hold.
static void set(ggml_tensor * t, float seed) {
    if (t->type != GGML_TYPE_Q8_0) {
        fill(t, seed);
        return;
    }
    const std::vector<float> values = numbers((size_t) ggml_nelements(t), seed);
    std::vector<uint8_t>     blocks(ggml_nbytes(t));
    ggml_quantize_chunk(t->type, values.data(), blocks.data(), 0, ggml_nrows(t), t->ne[0], nullptr);
    ggml_backend_tensor_set(t, blocks.data(), 0, blocks.size());
}

// Sets the cells that a call must not read to numbers that change its result if it does.
static void set_beyond(ggml_tensor * cells, int64_t n_kv, bool transposed) {
    const int64_t n = CELLS - n_kv;
    if (n == 0) {
        return;
    }
    const std::vector<float> values((size_t) (n * KV), 30.0f);
    std::vector<uint8_t>     rows(ggml_row_size(cells->type, n * KV));
    ggml_quantize_chunk(cells->type, values.data(), rows.data(), 0, 1, n * KV, nullptr);
    const size_t cell = ggml_type_size(cells->type);
    for (int64_t i = 0; transposed && i < KV; i++) {
        ggml_backend_tensor_set(cells, rows.data(), (size_t) (i * CELLS + n_kv) * cell, (size_t) n * cell);
    }
    if (!transposed) {
        ggml_backend_tensor_set(cells, rows.data(), (size_t) n_kv * cells->nb[1], rows.size());
    }
}

template <typename T, typename F> static void set_each(ggml_tensor * t, F value) {
    std::vector<T> values((size_t) ggml_nelements(t));
    for (size_t i = 0; i < values.size(); i++) {
        values[i] = (T) value((int64_t) i);
    }
    ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
}

static void set_inputs(const layer & l, const call & c) {
    float seed = 1;
    for (ggml_tensor * t : l.weights) {
        set(t, seed++);
    }
    for (int i = 0; i < 2; i++) {
        set(l.cells[i], seed++);
        set_beyond(l.cells[i], c.n_kv, c.is_transposed(i));
    }
    set_each<int32_t>(l.ids, [](int64_t i) { return i * 7 % VOCAB; });
    set_each<int32_t>(l.positions, [&](int64_t i) { return c.past + i; });
    set_each<int32_t>(l.experts, [](int64_t i) { return (i / 2 + i % 2) % EXPERT; });
    set_each<int32_t>(l.out_ids, [&](int64_t i) { return c.n - c.n_out + i; });
    // cells in a mixed order, as in a cache that several sequences used
    const auto cell_of = [&](int64_t i) {
        return (c.past + i) * 3 % c.n_kv;
    };
    set_each<int64_t>(l.rows, cell_of);
    if (l.value_rows) {
        set_each<int64_t>(l.value_rows, [&](int64_t i) { return i % KV * CELLS + cell_of(i / KV); });
    }
    const auto is_hidden = [&](int64_t i) {
        // cell `at` holds the token at the position whose triple is `at`, modulo n_kv
        const int64_t at   = i % c.n_kv;
        const int64_t last = c.past + i / c.n_kv;
        for (int64_t p = std::max<int64_t>(last - c.window + 1, 0); p <= last; p++) {
            if (p * 3 % c.n_kv == at && p % c.n_seqs == last % c.n_seqs) {
                return c.blind && i / c.n_kv == c.n - 1;
            }
        }
        return true;
    };
    if (l.mask->type == GGML_TYPE_F16) {
        set_each<ggml_fp16_t>(l.mask, [&](int64_t i) { return is_hidden(i) ? 0xFC00 : 0; });
    } else {
        set_each<float>(l.mask, [&](int64_t i) { return is_hidden(i) ? -INFINITY : 0.0f; });
    }
}

static std::vector<uint8_t> bytes(const ggml_tensor * t) {
    std::vector<uint8_t> data(ggml_nbytes(t));
    ggml_backend_tensor_get(t, data.data(), 0, data.size());
    return data;
}

// All results of a call: its logits, and the two caches.
struct outcome {
    std::vector<float>   logits;
    std::vector<uint8_t> cells[2];
};

static outcome compute(ggml_backend_dev_t dev, const call & c) {
    ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
    context          ctx;
    const layer      l     = build(ctx.get(), c);
    ggml_cgraph *    graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, l.result);
    require_kernels(dev, graph);
    // all in one buffer, so that a write beyond a tensor changes its neighbor
    ggml_backend_buffer_ptr buffer = allocate(ctx, backend);
    set_inputs(l, c);
    std::vector<std::pair<ggml_tensor *, std::vector<uint8_t>>> before;
    for (ggml_tensor * t = ggml_get_first_tensor(ctx.get()); t; t = ggml_get_next_tensor(ctx.get(), t)) {
        if (t->op == GGML_OP_NONE && t != l.cells[0] && t != l.cells[1]) {
            before.emplace_back(t, bytes(t));
        }
    }
    for (int round = 0; round < 2; round++) {  // the second round uses the first one's plan
        const ggml_status status = ggml_backend_graph_compute(backend.get(), graph);
        check(status == GGML_STATUS_SUCCESS, std::string("graph_compute: ") + ggml_status_to_string(status));
    }
    for (const auto & [t, data] : before) {
        check(bytes(t) == data, std::string(t->name) + " was changed");
    }
    return {
        read(l.result), { bytes(l.cells[0]), bytes(l.cells[1]) }
    };
}

// Compares, bit for bit, the cells that no token was written to.
static void compare_cells(const call & c, const outcome & got, const outcome & wanted) {
    std::vector<bool> written((size_t) CELLS);
    for (int64_t i = 0; i < c.n; i++) {
        written[(size_t) ((c.past + i) * 3 % c.n_kv)] = true;
    }
    const auto same = [&](int i, size_t offset, size_t size) {
        return memcmp(&got.cells[i][offset], &wanted.cells[i][offset], size) == 0;
    };
    for (int i = 0; i < 2; i++) {
        const size_t row = ggml_row_size(c.is_cell_quantized(i) ? GGML_TYPE_Q8_0 : GGML_TYPE_F16, KV);
        for (size_t cell = 0; cell < written.size(); cell++) {
            bool unchanged = written[cell] || c.is_transposed(i) || same(i, cell * row, row);
            for (size_t k = 0; c.is_transposed(i) && !written[cell] && k < (size_t) KV; k++) {
                unchanged = unchanged && same(i, (k * CELLS + cell) * sizeof(ggml_fp16_t), sizeof(ggml_fp16_t));
            }
            check(unchanged, "cell " + std::to_string(cell) + " was changed");
        }
    }
}

// Appends logits to the file that SCENARIO_LOGITS names, to compare runs.
static void write_logits(const std::vector<float> & logits) {
    if (const char * path = getenv("SCENARIO_LOGITS")) {
        std::ofstream file(path, std::ios::binary | std::ios::app);
        file.write((const char *) logits.data(), (std::streamsize) (logits.size() * sizeof(float)));
    }
}

static void compare_logits(const call & c, const outcome & got, const outcome & wanted) {
    double error = 0;
    double size  = 0;
    check(got.logits.size() == wanted.logits.size() && !wanted.logits.empty(), "logits of different sizes");
    for (size_t i = 0; i < wanted.logits.size(); i++) {
        error += std::pow((double) got.logits[i] - (double) wanted.logits[i], 2.0);
        size += std::pow((double) wanted.logits[i], 2.0);
    }
    // the CPU's products with a quantized cache also quantize the query
    check(error <= (c.quantized ? 1e-2 : 1e-3) * size, "n " + std::to_string(c.n) + ", past " + std::to_string(c.past) +
                                                           ", n_kv " + std::to_string(c.n_kv) + ": error " +
                                                           std::to_string(error / size));
}

static void against_cpu(const call & c) {
    const outcome got    = compute(neuron, c);
    const outcome wanted = compute(cpu, c);
    compare_cells(c, got, wanted);
    write_logits(got.logits);
    compare_logits(c, got, wanted);
}

// A call whose nodes the scheduler allocates, which reuses the memory of nodes after their last use.
static void scheduled(const call & c, bool watched, bool output = false) {
    ggml_backend_ptr       device(ggml_backend_dev_init(neuron, nullptr));
    ggml_backend_ptr       host(ggml_backend_dev_init(cpu, nullptr));
    ggml_backend_t         backends[] = { device.get(), host.get() };
    ggml_backend_sched_ptr scheduler(
        ggml_backend_sched_new(backends, nullptr, 2, GGML_DEFAULT_GRAPH_SIZE, false, true));
    context       ctx;
    const layer   l     = build(ctx.get(), c);
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, l.result);
    ggml_set_output(l.result);
    if (output) {
        ggml_set_output(l.scores);
    }
    ggml_backend_buffer_ptr leaves(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(neuron), 1 << 20));
    ggml_tallocr            allocator = ggml_tallocr_new(leaves.get());
    for (ggml_tensor * t = ggml_get_first_tensor(ctx.get()); t; t = ggml_get_next_tensor(ctx.get(), t)) {
        if (t->op == GGML_OP_NONE) {
            check(ggml_tallocr_alloc(&allocator, t) == GGML_STATUS_SUCCESS, "no memory");
        }
    }
    check(ggml_backend_sched_alloc_graph(scheduler.get(), graph), "no memory");
    set_inputs(l, c);
    if (watched) {
        ggml_backend_sched_set_eval_callback(
            scheduler.get(), [](ggml_tensor *, bool, void *) { return true; }, nullptr);
    }
    const ggml_status status = ggml_backend_sched_graph_compute(scheduler.get(), graph);
    check(status == GGML_STATUS_SUCCESS, std::string("graph_compute: ") + ggml_status_to_string(status));
    compare_logits(c, { read(l.result), {} }, compute(cpu, c));
    const std::vector<float> scores = output ? read(l.scores) : std::vector<float>{};
    for (size_t at = 0; at < scores.size(); at += (size_t) c.n_kv) {
        float sum = 0;
        for (size_t i = 0; i < (size_t) c.n_kv; i++) {
            sum += scores[at + i];
        }
        check(std::fabs(sum - 1) < 1e-3f, "a row of scores sums up to " + std::to_string(sum));
    }
}

// Calls for which kernels are recorded: each number of tokens with each length of the cache, and logits of all tokens
// or of one.
static void few(bool flash) {
    std::string missing;
    for (const bool quantized : { false, true }) {
        for (const int64_t n : flash ? std::vector<int64_t>{ 1, 4, 16, 64 } : std::vector<int64_t>{ 1, 16 }) {
            for (const int64_t n_kv : { 64, 256 }) {
                for (const int64_t n_out : { (int64_t) 1, n }) {
                    try {
                        against_cpu({ n, n_kv - n, n_kv, n_out, quantized, flash });
                    } catch (const std::exception & error) {
                        missing = error.what();
                    }
                }
            }
        }
    }
    check(missing.empty(), missing);
}

// Random calls.
static void any(bool flash) {
    uint64_t   state = 1;
    const auto below = [&](int64_t n) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (int64_t) (state >> 33) % n;
    };
    for (int round = 0; round < 24; round++) {
        call c{};
        c.n    = 1 + (round < 9 ? round : below(60));
        c.n_kv = std::min<int64_t>(c.n + 1 + below(CELLS - c.n), CELLS);
        c.n_kv += c.n_kv % 3 == 0 ? 1 : 0;  // 3 and n_kv have no common divisor: each token has its own cell
        c.n_kv  = std::min<int64_t>(c.n_kv, CELLS);
        c.past  = below(c.n_kv - c.n + 1);
        c.n_out = 1 + below(c.n);

        c.quantized = below(2) != 0;
        c.flash     = flash;
        c.n_seqs    = 1 + below(3);
        c.window    = below(2) ? CELLS : 1 + below(40);
        c.blind     = flash && below(4) == 0;  // SOFT_MAX of nothing is NaN, also in ggml
        against_cpu(c);
    }
}

// Attention of several streams: each stream has its own cache, tokens and mask, or all streams share a mask.
static std::vector<float> attend(ggml_backend_dev_t dev,
                                 const call &       c,
                                 int64_t            n_streams,
                                 bool               one_mask,
                                 int64_t            n_cells = CELLS) {
    ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
    context          ctx;
    const size_t     size = sizeof(float);
    ggml_tensor *    q    = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, HEAD, EMBD / HEAD, c.n * n_streams);
    ggml_tensor *    mask = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F16, c.n_kv, c.n, 1, one_mask ? 1 : n_streams);
    ggml_tensor *    cells[2];
    ggml_tensor *    of_streams[2];
    for (int i = 0; i < 2; i++) {
        const ggml_type type = c.quantized ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
        cells[i]             = ggml_new_tensor_3d(ctx.get(), type, KV, n_cells, n_streams);
        of_streams[i]        = ggml_view_4d(ctx.get(), cells[i], HEAD, c.n_kv, KV / HEAD, n_streams, cells[i]->nb[1],
                                            ggml_row_size(type, HEAD), cells[i]->nb[2], 0);
    }
    ggml_tensor * queries = ggml_view_4d(ctx.get(), q, HEAD, c.n, EMBD / HEAD, n_streams, EMBD * size, HEAD * size,
                                         (size_t) c.n * EMBD * size, 0);
    ggml_tensor * result =
        ggml_flash_attn_ext(ctx.get(), queries, of_streams[0], of_streams[1], mask, 0.01f, 0.0f, 0.0f);
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, result);
    require_kernels(dev, graph);
    ggml_backend_buffer_ptr buffer = allocate(ctx, backend);
    set(q, 1);
    set(cells[0], 2);
    set(cells[1], 3);
    set_each<ggml_fp16_t>(mask, [&](int64_t i) {
        const int64_t stream = i / (c.n_kv * c.n);
        return i % c.n_kv > c.past + stream + i / c.n_kv % c.n ? 0xFC00 : 0;
    });
    for (int round = 0; round < 2; round++) {
        const ggml_status status = ggml_backend_graph_compute(backend.get(), graph);
        check(status == GGML_STATUS_SUCCESS, std::string("graph_compute: ") + ggml_status_to_string(status));
    }
    return read(result);
}

static void streams() {
    for (const auto & [n, n_kv] : std::vector<std::pair<int64_t, int64_t>>{
             { 1,  64  },
             { 4,  256 },
             { 3,  100 },
             { 23, 64  },
             { 61, 256 }
    }) {
        for (const int64_t n_streams : { 2, 5 }) {
            for (const bool quantized : { false, true }) {
                const call c{ n, 1, n_kv, 1, quantized };
                const bool one_mask = n_streams == 5 && n == 3;
                compare_logits(c, { attend(neuron, c, n_streams, one_mask), {} },
                               { attend(cpu, c, n_streams, one_mask), {} });
            }
        }
    }
}

}  // namespace

scenario_table tokens_scenarios() {
    return {
        { "few-tokens",             [] { few(true); }                                                },
        { "few-tokens-of-scores",   [] { few(false); }                                               },
        { "three-tokens",           [] { against_cpu({ 3, 5, 20, 1 }); }                             },
        { "any-tokens",             [] { any(true); }                                                },
        { "streams",                streams                                                          },
        { "short-streams",          [] { attend(neuron, { 4, 1, 100, 1 }, 5, false, 100); }          },
        { "any-tokens-of-scores",   [] { any(false); }                                               },
        { "three-tokens-of-scores",
         [] {
              against_cpu({ 3, 5, 20, 1, false, false });
              against_cpu({ 7, 30, 100, 2, true, false });
          }                                                                                          },
        { "scheduled-scores",       [] { scheduled({ 21, 30, 100, 2, true, false }, false); }        },
        { "wanted-scores",          [] { scheduled({ 21, 30, 100, 2, false, false }, false, true); } },
        { "watched-scores",         [] { scheduled({ 21, 30, 100, 2, true, false }, true); }         },
    };
}
