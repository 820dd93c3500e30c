// Random graphs.

#include "random.h"

#include "ggml.h"
#include "graph.h"

#include <algorithm>
#include <cstddef>
#include <random>
#include <vector>

void random_graph(graph & g, unsigned seed) {
    std::mt19937 random(seed);
    const auto   below = [&](size_t n) {
        return (int) (random() % n);
    };
    std::vector<ggml_tensor *> rows;  // of 64 by 4
    for (int i = 0; i < 3; i++) {
        rows.push_back(g.input(GGML_TYPE_F32, 64, 4));
    }
    ggml_tensor * cells = g.input(GGML_TYPE_F16, 64, 12);
    ggml_tensor * index = g.input(GGML_TYPE_I64, 4);
    ggml_tensor * state = g.input(GGML_TYPE_F32, 64, 6);
    g.written           = { cells, state };
    const auto any      = [&] {
        ggml_tensor * t = rows[(size_t) below(rows.size())];
        return below(4) ? t : ggml_view_2d(g.get(), t, 64, 2, t->nb[1], (size_t) below(3) * t->nb[1]);
    };
    const auto full = [&] {
        return rows[rows.size() - 1 - (size_t) below(std::min<size_t>(rows.size(), 3))];
    };
    ggml_context * ctx = g.get();
    while ((int) g.work().size() < 14) {
        ggml_tensor * t = full();
        switch (below(13)) {
            case 0:
                t = ggml_add(ctx, t, full());
                break;
            case 1:
                t = ggml_mul(ctx, t, full());
                break;
            case 2:
                t = ggml_sub(ctx, t, any());
                break;
            case 3:
                t = ggml_rms_norm(ctx, t, 1e-5f);
                break;
            case 4:
                t = ggml_silu(ctx, t);
                break;
            case 5:
                t = ggml_scale(ctx, t, 0.5f);
                break;
            case 6:
                t = ggml_mul_mat(ctx, g.input(GGML_TYPE_F16, 64, 64), t);
                break;
            case 7:
                t = ggml_soft_max(ctx, t);
                break;
            case 8:
                t = ggml_mul_mat(ctx, ggml_view_2d(ctx, cells, 64, 4, cells->nb[1], (size_t) below(8) * cells->nb[1]),
                                 t);
                t = ggml_add(ctx, full(),
                             g.add(ggml_repeat(ctx, g.add(ggml_cont(ctx, ggml_transpose(ctx, t))), full())));
                break;
            case 9:
                g.add(ggml_set_rows(ctx, cells, t, index));
                continue;
            case 10:
                g.add(
                    ggml_cpy(ctx, t, ggml_view_2d(ctx, state, 64, 4, state->nb[1], (size_t) below(3) * state->nb[1])));
                continue;
            case 11:
                t = ggml_add(ctx, t, ggml_view_2d(ctx, state, 64, 4, state->nb[1], state->nb[1]));
                break;
            default:
                t = ggml_cont(ctx, ggml_transpose(ctx, ggml_reshape_2d(ctx, t, 16, 16)));
                t = ggml_reshape_2d(ctx, t, 64, 4);
                g.add(t);
                break;
        }
        rows.push_back(g.add(t));
        if (below(12) == 0) {
            ggml_set_output(rows.back());
        }
    }
    ggml_tensor * last = full();
    g.end(ggml_add(ctx, last, full()), 0, {});
    // two groups with a node between them
    const int n = (int) g.work().size();
    const int a = 2 + below(5);
    const int b = a + 1 + 2 + below(4);
    g.groups    = {
        { below(2), a },
        { a + 2, std::min(b, n - 1) }
    };
    g.launches = 2;
}
