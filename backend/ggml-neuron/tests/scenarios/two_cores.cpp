// Two NeuronCores whose launches in flight wait for each other.

#include "../values.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "placed.h"
#include "scenario.h"

#include <cstddef>
#include <cstring>
#include <deque>
#include <vector>

// One NeuronCore uses another core's result, round by round.
static void two_cores_in_flight() {
    const ggml_backend_ptr first(ggml_backend_dev_init(core(0), nullptr));
    const ggml_backend_ptr second(ggml_backend_dev_init(core(1), nullptr));
    placed                 from(first, add);
    placed                 to(second, add);
    const auto             event_of = [](int n) {
        ggml_backend_event_t event = ggml_backend_event_new(core(n));
        check(event != nullptr, "no event");
        return ggml_backend_event_ptr(event);
    };
    const ggml_backend_event_ptr computed = event_of(0);
    const ggml_backend_event_ptr consumed = event_of(1);
    for (int i = 0; i < 6; i++) {
        from.set(i);
        from.compute();
        ggml_backend_event_record(computed.get(), first.get());
        ggml_backend_event_wait(second.get(), computed.get());
        ggml_backend_tensor_copy_async(first.get(), second.get(), from.b.result, to.b.inputs[0]);
        to.compute();
        ggml_backend_event_record(consumed.get(), second.get());
        ggml_backend_event_synchronize(consumed.get());
        compare(to.get(), run(cpu, add, i + 1));
    }
}

// Two NeuronCores with graphs: the second core's graph adds to the first core's result.
struct pair_of_cores {
    const ggml_backend_ptr first{ ggml_backend_dev_init(core(0), nullptr) };
    const ggml_backend_ptr second{ ggml_backend_dev_init(core(1), nullptr) };
    std::deque<placed>     from;
    std::deque<placed>     to;

    explicit pair_of_cores(int n) {
        for (int i = 0; i < n; i++) {
            from.emplace_back(first, add);
            to.emplace_back(second, add);
            from.back().set(i);
            to.back().set(i);
        }
    }

    void copy(size_t i, size_t j) {
        ggml_backend_tensor_copy_async(first.get(), second.get(), from[i].b.result, to[j].b.inputs[0]);
    }

    void compute(size_t i) {
        from[i].compute();
        copy(i, i);
        to[i].compute();
    }

    // Returns the expected value of `to` when both were set in round `i`.
    static std::vector<float> wanted(int i) {
        std::vector<float>       sum  = run(cpu, add, i + 1);
        const std::vector<float> more = numbers(64, 2 + (float) i);
        for (size_t k = 0; k < sum.size(); k++) {
            sum[k] += more[k % 64];
        }
        return sum;
    }
};

// Two threads copy between the same tensors, each to another core, and each makes its core wait for the other core.
static void two_cores_crossing() {
    pair_of_cores                t(1);
    const ggml_backend_t         backends[] = { t.first.get(), t.second.get() };
    ggml_tensor * const          tensors[]  = { t.from[0].b.inputs[0], t.to[0].b.inputs[0] };
    const ggml_backend_event_ptr events[]   = { ggml_backend_event_ptr(ggml_backend_event_new(core(0))),
                                                ggml_backend_event_ptr(ggml_backend_event_new(core(1))) };
    fill(tensors[0], 5);
    fill(tensors[1], 6);
    const std::vector<float> values[] = { read(tensors[0]), read(tensors[1]) };
    in_threads(2, [&](int n) {
        placed & own = n ? t.to[0] : t.from[0];
        for (int i = 0; i < 300; i++) {
            ggml_backend_tensor_copy_async(backends[1 - n], backends[n], tensors[1 - n], tensors[n]);
            own.compute();
            ggml_backend_event_record(events[n].get(), backends[n]);
            ggml_backend_event_wait(backends[n], events[1 - n].get());
        }
        ggml_backend_synchronize(backends[n]);
    });
    for (const ggml_tensor * tensor : tensors) {
        const std::vector<float> got = read(tensor);
        check(got == values[0] || got == values[1], "neither of the tensors");
    }
}

// The first core's launch fails late. The second core waits for it, and computes afterwards.
static void two_cores_waiting() {
    pair_of_cores                t(1);
    const ggml_backend_event_ptr computed(ggml_backend_event_new(core(0)));
    const ggml_backend_event_ptr waited(ggml_backend_event_new(core(1)));
    t.from[0].compute();
    ggml_backend_event_record(computed.get(), t.first.get());
    ggml_backend_event_wait(t.second.get(), computed.get());
    ggml_backend_event_record(waited.get(), t.second.get());
    ggml_backend_event_synchronize(waited.get());
    t.from[0].compute(GGML_STATUS_FAILED);
    t.compute(0);
    compare(t.to[0].get(), t.wanted(0));
}

// The first core's launch fails after graph_compute returned, and with it the copy of its result.
static void two_cores_late() {
    pair_of_cores t(1);
    t.from[0].compute();
    t.copy(0, 0);
    t.to[0].compute(GGML_STATUS_FAILED);
    t.to[0].compute(GGML_STATUS_FAILED);  // the copy is lost until it is made again
    t.from[0].compute(GGML_STATUS_FAILED);
    t.compute(0);
    compare(t.to[0].get(), t.wanted(0));
}

// The functions that ggml's meta backend looks up by name, for both cores.
struct reducing_pair : pair_of_cores {
    template <typename F> static F named(const char * name) {
        void * address = ggml_backend_reg_get_proc_address(neurons, name);
        check(address != nullptr, name);
        return (F) address;
    }

    void * comm = nullptr;

    reducing_pair() : pair_of_cores(1) {
        ggml_backend_t backends[] = { first.get(), second.get() };
        comm                      = named<ggml_backend_comm_init_t>("ggml_backend_comm_init")(backends, 2);
        check(comm != nullptr, "no comm");
    }

    ~reducing_pair() { named<ggml_backend_comm_free_t>("ggml_backend_comm_free")(comm); }

    bool reduce(ggml_tensor * a, ggml_tensor * b) {
        ggml_tensor * tensors[] = { a, b };
        return named<ggml_backend_comm_allreduce_tensor_t>("ggml_backend_comm_allreduce_tensor")(comm, tensors);
    }

    bool reduce() { return reduce(from[0].b.result, to[0].b.result); }

    void compute() {
        from[0].compute();
        to[0].compute();
    }
};

static std::vector<float> sum_of(std::vector<float> a, const std::vector<float> & b) {
    for (size_t k = 0; k < a.size(); k++) {
        a[k] += b[k];
    }
    return a;
}

// Both cores receive the sum of their results, repeatedly; a result without the compute flag counts as zeros.
static void two_cores_reduced() {
    reducing_pair t;
    placed &      a = t.from[0];
    placed &      b = t.to[0];
    for (int i = 0; i < 20; i++) {
        a.set(i);
        b.set(2 * i);
        t.compute();
        check(t.reduce(), "not reduced");
        const std::vector<float> wanted = sum_of(run(cpu, add, i + 1), run(cpu, add, 2 * i + 1));
        compare(a.get(), wanted);
        check(a.get() == b.get(), "the cores have different sums");
    }
    t.compute();
    b.b.result->flags &= ~GGML_TENSOR_FLAG_COMPUTE;
    check(t.reduce(), "not reduced");
    compare(b.get(), run(cpu, add, 20));
    compare(a.get(), run(cpu, add, 20));
}

// The meta backend itself copies and adds tensors of another core, type or shape; the backend leaves them unchanged.
static void two_cores_not_reduced() {
    reducing_pair t;
    placed &      a = t.from[0];
    placed &      b = t.to[0];
    t.compute();
    const std::vector<float> before = a.get();
    check(!t.reduce(b.b.result, a.b.result), "reduced on other cores");
    check(!t.reduce(a.b.inputs[0], b.b.inputs[1]), "reduced shapes that differ");
    for (ggml_tensor * tensor : { a.b.result, b.b.result }) {
        tensor->type = GGML_TYPE_I32;
    }
    check(!t.reduce(), "reduced integers");
    for (ggml_tensor * tensor : { a.b.result, b.b.result }) {
        tensor->type = GGML_TYPE_F32;
    }
    check(a.get() == before, "changed");
    const ggml_backend_ptr other(ggml_backend_dev_init(cpu, nullptr));
    ggml_backend_t         mixed[] = { t.first.get(), other.get() };
    check(!t.named<ggml_backend_comm_init_t>("ggml_backend_comm_init")(mixed, 2), "a comm with the CPU");
}

// A launch of the second core fails, and with it the reduction: only the first core's next graph fails.
static void two_cores_unreduced() {
    reducing_pair t;
    t.to[0].compute();
    t.from[0].compute();
    check(t.reduce(), "left to the meta backend");
    t.from[0].compute(GGML_STATUS_FAILED);
    t.compute();
    check(t.reduce(), "not reduced");
    compare(t.from[0].get(), sum_of(run(cpu, add, 1), run(cpu, add, 1)));
}

// The parts are computed when a result is read, and the graphs of the calls are gone by then.
static void two_cores_kept() {
    reducing_pair t;
    for (placed * part : { &t.from[0], &t.to[0] }) {
        ggml_cgraph graph = *part->graph;
        graph.uid         = ggml_graph_next_uid();
        check(ggml_backend_graph_compute_async(part->backend, &graph) == GGML_STATUS_SUCCESS, "not computed");
        memset((void *) &graph, 0xff, sizeof(graph));
    }
    check(t.reduce(), "not reduced");
    compare(t.to[0].get(), sum_of(run(cpu, add), run(cpu, add)));
}

scenario_table two_cores_scenarios() {
    return {
        { "two-cores-in-flight",   two_cores_in_flight   },
        { "two-cores-crossing",    two_cores_crossing    },
        { "two-cores-waiting",     two_cores_waiting     },
        { "two-cores-late",        two_cores_late        },
        { "two-cores-reduced",     two_cores_reduced     },
        { "two-cores-not-reduced", two_cores_not_reduced },
        { "two-cores-unreduced",   two_cores_unreduced   },
        { "two-cores-kept",        two_cores_kept        },
    };
}
