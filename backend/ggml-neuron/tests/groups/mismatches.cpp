// Groups of nodes without a kernel.

#include "ggml.h"
#include "graph.h"

#include <map>
#include <string>

const std::map<std::string, norm_options> & mutations() {
    static const std::map<std::string, norm_options> all = [] {
        std::map<std::string, norm_options> m;
        m["shape"].n        = 65;  // needs more pieces than the limit
        m["type"].type      = GGML_TYPE_F32;
        m["parameters"].eps = 2e-5f;
        m["strides"].gaps   = true;
        m["order"].swapped  = true;
        m["op"].add         = true;
        m["wiring"].twice   = true;
        m["memory"].inplace = true;
        m["roots"].added    = true;
        return m;
    }();
    return all;
}

void square(graph & g, const norm_options & o) {
    ggml_tensor * x = g.input(GGML_TYPE_F32, 64, o.n);
    ggml_tensor * w = o.same ? x : g.input(GGML_TYPE_F32, 64, o.n);
    ggml_tensor * t = g.add(ggml_rms_norm(g.get(), x, o.eps));
    t               = g.add(o.added     ? ggml_add(g.get(), t, w)
                            : o.swapped ? ggml_mul(g.get(), w, t)
                                        : ggml_mul(g.get(), t, o.twice ? t : w));
    g.end(product(g, t), 0, { 3 });
}

void square_group(graph & g) {
    square(g, {});
}

norm_options one_tensor(bool shared) {
    norm_options o;
    o.same   = !shared;
    o.shared = shared;
    return o;
}

void tied_wiring(graph & g) {
    square(g, one_tensor(false));
}

void tied_roots(graph & g) {
    const norm_options o = one_tensor(true);
    g.end(product(g, norm(g, nullptr, o), o), 0, { 3 });
}

void tied(graph & g) {
    norm_options o = one_tensor(false);
    o.added        = true;
    square(g, o);
}

void mutated(graph & g, const norm_options & o) {
    if (o.swapped || o.twice || o.added) {
        square(g, o);
    } else {
        g.end(product(g, norm(g, nullptr, o), o), 0, {});
    }
    g.groups.clear();
    g.launches = 0;
}

void mutated_written(graph & g) {
    in_place_of(g, 4, true);
    g.groups.clear();
    g.launches = 0;
}

void escapes(graph & g) {
    ggml_tensor * t = norm(g, nullptr);
    g.end(ggml_add(g.get(), product(g, t), t), 0, {});
}

void part_escapes(graph & g) {
    ggml_tensor * t = norm(g, nullptr);
    ggml_tensor * y = product(g, t);
    ggml_tensor * v = ggml_view_2d(g.get(), t, 64, 1, t->nb[1], t->nb[1]);
    g.end(ggml_add(g.get(), y, v), 0, {});
}

void middle_is_output(graph & g) {
    ggml_tensor * t = norm(g, nullptr);
    ggml_set_output(t);
    g.end(product(g, t), 0, {});
}

void ends_early(graph & g) {
    g.end(norm(g, nullptr), 0, {});
}
