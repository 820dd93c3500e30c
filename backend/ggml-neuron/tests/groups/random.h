// Random graphs.

#pragma once

#include "ggml.h"
#include "graph.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

void random_graph(graph & g, unsigned seed);

// Graphs that kernels for more tokens and cells must compute correctly, or refuse: rows, attention of both kinds, and
// ops that mix rows.
class lengths_graph {
  public:
    lengths_graph(graph & g, unsigned seed, int64_t n, int64_t n_seen) :
        g(g), random(seed), causal(seed % 4 != 3), n(n), n_seen(n_seen) {}

    void make() {
        for (int i = 0; i < 2; i++) {
            rows.push_back(g.input(GGML_TYPE_F32, 64, n));
        }
        k         = g.input(GGML_TYPE_F16, 64, 96);
        v         = g.input(GGML_TYPE_F16, 96, 64);
        state     = g.input(GGML_TYPE_F32, 64, 32);
        index     = g.input(GGML_TYPE_I64, n);
        mask      = g.input(GGML_TYPE_F16, n_seen, n);
        scores    = g.input(GGML_TYPE_F32, n_seen, n);
        g.written = { k, state };
        if (causal) {
            g.causal = { mask, scores };
        }
        while (g.work().size() < 14) {
            if (ggml_tensor * t = next()) {
                rows.push_back(g.add(t));
            }
        }
        g.end(ggml_add(ctx(), any(), any()), 0, {});
        const int end = (int) g.work().size() - 1;
        const int a   = 3 + below(5);
        g.groups      = {
            { below(3), a },
            { a + 2, std::min(a + 4 + below(5), end) }
        };
    }

  private:
    int below(size_t most) { return (int) (random() % most); }

    ggml_context * ctx() { return g.get(); }

    ggml_tensor * any() { return rows[rows.size() - 1 - (size_t) below(std::min<size_t>(rows.size(), 3))]; }

    ggml_tensor * weights(int64_t n_rows = 64) { return g.input(GGML_TYPE_F16, 64, n_rows); }

    ggml_tensor * transposed(ggml_tensor * t) { return g.add(ggml_cont(ctx(), ggml_transpose(ctx(), t))); }

    ggml_tensor * heads(ggml_tensor * t) {
        return ggml_permute(ctx(), ggml_reshape_3d(ctx(), t, 32, 2, n), 0, 2, 1, 3);
    }

    ggml_tensor * keys() { return ggml_view_3d(ctx(), k, 32, n_seen, 2, k->nb[1], k->nb[1] / 2, 0); }

    ggml_tensor * flash_attention() {
        ggml_tensor * t = ggml_flash_attn_ext(ctx(), heads(any()), keys(), keys(), mask, 0.1f, 0.0f, 0.0f);
        return ggml_add(ctx(), ggml_reshape_2d(ctx(), g.add(t), 64, n), any());
    }

    ggml_tensor * attention() {
        ggml_tensor * t      = g.add(ggml_mul_mat(ctx(), keys(), heads(any())));
        ggml_tensor * values = ggml_view_3d(ctx(), v, n_seen, 32, 2, v->nb[1], 32 * v->nb[1], 0);
        t                    = g.add(ggml_soft_max_ext(ctx(), t, below(4) ? scores : nullptr, 0.1f, 0.0f));
        t                    = g.add(ggml_mul_mat(ctx(), values, t));
        return ggml_cont_2d(ctx(), ggml_permute(ctx(), t, 0, 2, 1, 3), 64, n);
    }

    // Returns a product that sums over the tokens, times a tensor.
    ggml_tensor * mixed(ggml_tensor * t) {
        return ggml_mul_mat(ctx(), g.add(ggml_mul_mat(ctx(), transposed(t), transposed(any()))), any());
    }

    // Returns a row of a result, or a part of a written tensor, for all tokens.
    ggml_tensor * row() {
        return below(2) ? ggml_view_2d(ctx(), any(), 64, 1, 256, (size_t) below((size_t) n) * 256)
                        : ggml_view_2d(ctx(), state, 64, 1, 256, (size_t) below(9) * 256);
    }

    // Returns the next result, or NULL after a write.
    ggml_tensor * next() {
        ggml_tensor * t = any();
        switch (below(15)) {
            case 0:
                return ggml_add(ctx(), t, any());
            case 1:
                return ggml_mul(ctx(), t, any());
            case 2:
                return ggml_mul(ctx(), t, g.input(GGML_TYPE_F32, 64));
            case 3:
                return ggml_rms_norm(ctx(), t, 1e-5f);
            case 4:
                return ggml_silu(ctx(), t);
            case 5:
                return ggml_scale(ctx(), t, 0.5f);
            case 6:
            case 7:
                return ggml_mul_mat(ctx(), weights(), t);
            case 8:
                return ggml_soft_max(ctx(), t);
            case 9:
                return ggml_swiglu_split(ctx(), t, any());
            case 10:
                // as in layers, with values that F16 can hold
                g.add(ggml_set_rows(ctx(), k, g.add(ggml_rms_norm(ctx(), t, 1e-5f)), index));
                return below(4) ? flash_attention() : nullptr;
            case 11:
                return flash_attention();
            case 12:
                return attention();
            case 13:
                return below(3) ? ggml_sub(ctx(), t, row()) : mixed(t);
            default:
                if (below(2)) {
                    return transposed(g.add(ggml_scale(ctx(), transposed(t), 2.0f)));
                }
                g.add(ggml_cpy(ctx(), t, ggml_view_2d(ctx(), state, 64, n, state->nb[1], state->nb[1])));
                return nullptr;
        }
    }

    graph &                    g;
    std::mt19937               random;
    const bool                 causal;  // for the masks
    const int64_t              n;
    const int64_t              n_seen;
    std::vector<ggml_tensor *> rows;  // of 64 by n
    ggml_tensor *              k;
    ggml_tensor *              v;
    ggml_tensor *              state;
    ggml_tensor *              index;
    ggml_tensor *              mask;
    ggml_tensor *              scores;
};
