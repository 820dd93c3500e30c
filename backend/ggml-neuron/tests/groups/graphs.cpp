// Graphs whose groups have kernels.

#include "ggml.h"
#include "graph.h"

#include <cstddef>
#include <cstdint>
#include <vector>

ggml_tensor * norm(graph & g, ggml_tensor * x, const norm_options & o) {
    if (!x) {
        x = g.input(GGML_TYPE_F32, o.gaps ? 80 : 64, o.n + (o.shared ? 1 : 0));
    }
    ggml_tensor * root = x;
    if (o.gaps || o.shared) {
        x = ggml_view_2d(g.get(), root, 64, o.n, root->nb[1], 0);
    }
    ggml_tensor * w = o.shared ? ggml_view_1d(g.get(), root, 64, (size_t) o.n * root->nb[1])
                      : o.same ? x
                               : g.input(GGML_TYPE_F32, 64, o.same ? o.n : 1);
    ggml_tensor * t = g.add(ggml_rms_norm(g.get(), x, o.eps));
    t               = o.add       ? ggml_add(g.get(), t, w)
                      : o.inplace ? ggml_mul_inplace(g.get(), t, w)
                      : o.swapped ? ggml_mul(g.get(), w, t)
                                  : ggml_mul(g.get(), t, w);
    return g.add(t);
}

ggml_tensor * product(graph & g, ggml_tensor * t, const norm_options & o) {
    return g.add(ggml_mul_mat(g.get(), g.input(o.type, 64, 64), t));
}

void hit(graph & g) {
    g.end(product(g, norm(g, nullptr)), 0, { 3 });
}

void twice_of(graph & g, int64_t n) {
    ggml_tensor * t = product(g, norm(g, nullptr, { n }));
    g.end(product(g, norm(g, t)), 0, { 3, 3 });
}

void twice(graph & g) {
    twice_of(g, 4);
}

void between(graph & g) {
    ggml_tensor * t = product(g, norm(g, nullptr));
    t               = g.add(ggml_silu(g.get(), t));
    g.end(product(g, norm(g, t)), 0, { 3 });
    g.groups.emplace_back(4, 6);
    g.launches = 2;
}

void cache_of(graph & g, int64_t n, int64_t n_seen) {
    ggml_tensor * cells = g.input(GGML_TYPE_F16, 32, 16);
    ggml_tensor * rows  = g.input(GGML_TYPE_I64, n);
    ggml_tensor * fresh = g.input(GGML_TYPE_F32, 32, n);
    ggml_tensor * q     = g.input(GGML_TYPE_F32, 32, 2);
    ggml_tensor * s     = g.add(ggml_scale(g.get(), fresh, 0.5f));
    g.add(ggml_set_rows(g.get(), cells, s, rows));
    ggml_tensor * seen = ggml_view_2d(g.get(), cells, 32, n_seen, cells->nb[1], cells->nb[1]);
    g.written          = { cells };
    g.end(ggml_mul_mat(g.get(), seen, q), 0, { 3 });
}

void cache(graph & g) {
    cache_of(g, 3, 8);
}

void attention_of(graph & g, const attention_options & o) {
    ggml_tensor * x    = g.input(GGML_TYPE_F32, 64, o.n);
    ggml_tensor * rows = g.input(GGML_TYPE_I64, o.n);
    ggml_tensor * mask = g.input(o.computed ? GGML_TYPE_F32 : GGML_TYPE_F16, o.n_seen, o.n);
    g.rows             = o.far ? rows : nullptr;
    g.far              = o.far;
    if (o.causal) {
        g.causal = { mask };
    }
    g.mask   = o.before ? mask : nullptr;
    g.before = o.before;
    if (o.computed) {
        mask = g.add(ggml_cast(g.get(), mask, GGML_TYPE_F16));
    }
    const auto cells = [&] {
        return o.kept ? g.cache(GGML_TYPE_F16, 64, o.n_cell) : g.input(GGML_TYPE_F16, 64, o.n_cell);
    };
    ggml_tensor * k    = cells();
    ggml_tensor * v    = cells();
    const auto    head = [&](ggml_tensor * t) {
        return ggml_view_3d(g.get(), t, 32, o.n_seen, 2, t->nb[1], t->nb[1] / 2, 0);
    };
    ggml_tensor * t = norm(g, x);
    ggml_tensor * q = product(g, t);
    if (o.writes) {
        g.add(ggml_set_rows(g.get(), k, product(g, t), rows));
        g.add(ggml_set_rows(g.get(), v, product(g, t), rows));
        g.written = { k, v };
    }
    q = ggml_permute(g.get(), ggml_reshape_3d(g.get(), q, 32, 2, o.n), 0, 2, 1, 3);
    t = g.add(ggml_flash_attn_ext(g.get(), q, head(k), head(v), o.masked ? mask : nullptr, 0.1f, 0.0f, 0.0f));
    t = product(g, ggml_reshape_2d(g.get(), t, 64, o.n));
    g.end(ggml_add(g.get(), t, x), o.computed, { o.writes ? 10 : 6 });
}

void attention(graph & g) {
    attention_of(g, {});
}

void copied_mask(graph & g) {
    ggml_tensor * from = g.input(GGML_TYPE_F16, 32, 5);
    ggml_tensor * mask = g.input(GGML_TYPE_F16, 32, 5);
    g.end(ggml_cpy(g.get(), from, mask), 0, {});
}

void scores_of(graph & g, const attention_options & o) {
    ggml_tensor * x      = g.input(GGML_TYPE_F32, 64, o.n);
    ggml_tensor * rows   = g.input(GGML_TYPE_I64, o.n);
    ggml_tensor * places = g.input(GGML_TYPE_I64, 64 * o.n);
    ggml_tensor * mask   = g.input(GGML_TYPE_F32, o.n_seen, o.n);
    if (o.causal) {
        g.causal = { mask };
        g.places = places;
        g.n_cell = o.n_cell;
    }
    ggml_tensor * k   = g.input(GGML_TYPE_F16, 64, o.n_cell);
    ggml_tensor * v   = g.input(GGML_TYPE_F16, 64 * o.n_cell);
    const size_t  row = (size_t) o.n_cell * v->nb[0];
    ggml_tensor * t   = norm(g, x);
    ggml_tensor * q   = g.add(ggml_mul_mat(g.get(), g.input(GGML_TYPE_F16, 64, 128), t));
    g.add(ggml_set_rows(g.get(), k, product(g, t), rows));
    ggml_tensor * fresh = ggml_reshape_2d(g.get(), product(g, t), 1, 64 * o.n);
    g.add(ggml_set_rows(g.get(), ggml_reshape_2d(g.get(), v, 1, 64 * o.n_cell), fresh, places));
    g.written           = { k, v };
    q                   = ggml_permute(g.get(), ggml_reshape_3d(g.get(), q, 32, 4, o.n), 0, 2, 1, 3);
    ggml_tensor * keys  = ggml_view_3d(g.get(), k, 32, o.n_seen, 2, k->nb[1], k->nb[1] / 2, 0);
    ggml_tensor * value = ggml_view_3d(g.get(), v, o.n_seen, 32, 2, row, 32 * row, 0);
    t                   = g.add(ggml_mul_mat(g.get(), keys, q));
    t                   = g.add(ggml_tanh(g.get(), g.add(ggml_scale(g.get(), t, 0.2f))));
    t                   = g.add(ggml_soft_max_ext(g.get(), t, o.masked ? mask : nullptr, 2.0f, 0.0f));
    t                   = ggml_permute(g.get(), g.add(ggml_mul_mat(g.get(), value, t)), 0, 2, 1, 3);
    t                   = g.add(ggml_cont_2d(g.get(), t, 128, o.n));
    t                   = g.add(ggml_mul_mat(g.get(), g.input(GGML_TYPE_F16, 128, 64), t));
    g.end(ggml_add(g.get(), t, x), 0, { 15 });
}

attention_options unmasked(int64_t n, int64_t n_seen) {
    return { n, n_seen, 96, false, true };
}

attention_options reading(int64_t n_seen, int64_t n_cell) {
    return { 2, n_seen, n_cell, true, false };
}

void in_place_of(graph & g, int64_t n, bool tied) {
    ggml_tensor * a    = g.input(GGML_TYPE_F32, 64, n);
    ggml_tensor * b    = tied ? a : g.input(GGML_TYPE_F32, 64, n);
    ggml_tensor * to   = g.input(GGML_TYPE_F32, 64, 9);
    ggml_tensor * part = ggml_view_2d(g.get(), to, 64, n, to->nb[1], 3 * to->nb[1]);
    ggml_tensor * t    = g.add(ggml_add(g.get(), a, b));
    t                  = g.add(ggml_scale_inplace(g.get(), t, 2.0f));
    g.add(ggml_add_inplace(g.get(), b, t));
    g.add(ggml_cpy(g.get(), t, part));
    g.written = { b, to };
    g.end(ggml_sub(g.get(), t, b), 0, { 5 });
}

void in_place(graph & g) {
    in_place_of(g, 4);
}

void views_of(graph & g, int64_t n) {
    ggml_tensor * x    = g.input(GGML_TYPE_F32, 64, n);
    ggml_tensor * t    = product(g, x);
    ggml_tensor * up   = ggml_view_2d(g.get(), t, 32, n, t->nb[1], 0);
    ggml_tensor * gate = ggml_view_2d(g.get(), t, 32, n, t->nb[1], 32 * sizeof(float));
    t                  = g.add(ggml_mul(g.get(), ggml_cont(g.get(), up), ggml_cont(g.get(), gate)));
    g.end(ggml_cont(g.get(), ggml_transpose(g.get(), t)), 0, { 5 });
}

void views(graph & g) {
    views_of(g, 3);
}

void several_results_of(graph & g, int64_t n) {
    ggml_tensor * a = g.input(GGML_TYPE_F32, 64, n);
    ggml_tensor * t = g.add(ggml_scale(g.get(), a, 0.5f));
    ggml_tensor * u = g.add(ggml_sqr(g.get(), t));
    ggml_tensor * v = g.add(ggml_add(g.get(), u, a));
    ggml_tensor * w = g.add(ggml_silu(g.get(), v));
    ggml_set_output(v);
    ggml_tensor * x = g.add(ggml_mul(g.get(), w, u));
    g.end(ggml_add(g.get(), x, v), 0, { 4 });
}

void several_results(graph & g) {
    several_results_of(g, 4);
}

void kept(graph & g) {
    ggml_tensor *              a = g.input(GGML_TYPE_F32, 64, 4);
    std::vector<ggml_tensor *> t;
    for (int i = 0; i < 4; i++) {
        t.push_back(g.add(ggml_scale(g.get(), a, 0.25f * (float) (i + 1))));
    }
    ggml_tensor * first  = g.add(ggml_add(g.get(), t[0], t[1]));
    ggml_tensor * second = g.add(ggml_mul(g.get(), first, t[2]));
    ggml_tensor * third  = g.add(ggml_sub(g.get(), second, t[3]));
    ggml_tensor * all    = g.add(ggml_add(g.get(), g.add(ggml_silu(g.get(), first)), g.add(ggml_sqr(g.get(), second))));
    g.end(ggml_add(g.get(), all, third), 4, { 3 });
}
