// Two NeuronCores with launches in flight that wait for each other.

#include "../values.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"
#include "placed.h"
#include "scenario.h"

#include <cstddef>
#include <deque>
#include <functional>
#include <vector>

// One NeuronCore computes what another one has computed, and both are given the next round before that is done.
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

// Two NeuronCores, and graphs for each: what the second one's adds to, the first one's computes.
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

    // What `to` comes to when both were set in a round.
    static std::vector<float> wanted(int i) {
        std::vector<float>       sum  = run(cpu, add, i + 1);
        const std::vector<float> more = numbers(64, 2 + (float) i);
        for (size_t k = 0; k < sum.size(); k++) {
            sum[k] += more[k % 64];
        }
        return sum;
    }
};

// Everything is given to both cores before the first one has computed anything, then again, and memory goes that jobs use.
static void two_cores_ahead() {
    pair_of_cores t(3);
    for (size_t i = 0; i < 3; i++) {
        t.compute(i);
    }
    for (int i = 0; i < 3; i++) {
        compare(t.to[(size_t) i].get(), t.wanted(i));
    }
    for (size_t i = 0; i < 3; i++) {
        t.compute(i);
    }
}

// A graph with copies around its kernel is behind an event of the other core.
static void two_cores_behind() {
    pair_of_cores                t(1);
    placed                       cut(t.second, add_three);
    const ggml_backend_event_ptr computed(ggml_backend_event_new(core(0)));
    cut.set(4);
    t.from[0].compute();
    ggml_backend_event_record(computed.get(), t.first.get());
    ggml_backend_event_wait(t.second.get(), computed.get());
    cut.compute();
    compare(cut.get(), run(cpu, add_three, 5));
}

// A tensor is set, computed anew and then freed, when a copy of it waits for the core that it is copied to.
static void two_cores_fenced() {
    pair_of_cores               t(2);
    placed &                    from        = t.from[0];
    const std::function<void()> overwrite[] = {
        [&from] { fill(from.b.result, 9); },
        [&from] {
            from.set(7);
            from.compute();
        },
        [&from] { from.buffer.reset(); },
    };
    for (const std::function<void()> & next : overwrite) {
        from.set(0);
        from.compute();
        ggml_backend_synchronize(t.first.get());
        t.to[1].compute();
        t.copy(0, 1);  // over what that reads
        t.copy(0, 0);
        next();
        t.to[0].compute();
        compare(t.to[0].get(), t.wanted(0));
    }
}

// Two threads copy between the same tensors, each to another core, and each has its core wait for the other one's.
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

// The first core's launch fails late. The second one, which waits for it, is done when that has failed.
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

// The first core's launch fails late, when a graph that reads its copy was given back by the second one.
static void two_cores_late() {
    pair_of_cores t(1);
    t.compute(0);
    ggml_backend_synchronize(t.second.get());
    t.to[0].compute(GGML_STATUS_FAILED);
    t.to[0].compute(GGML_STATUS_FAILED);  // the copy is lost until it is made anew
    t.from[0].compute(GGML_STATUS_FAILED);
    t.compute(0);
    compare(t.to[0].get(), t.wanted(0));
}

scenario_table two_cores_scenarios() {
    return {
        { "two-cores-in-flight", two_cores_in_flight },
        { "two-cores-ahead",     two_cores_ahead     },
        { "two-cores-behind",    two_cores_behind    },
        { "two-cores-fenced",    two_cores_fenced    },
        { "two-cores-crossing",  two_cores_crossing  },
        { "two-cores-waiting",   two_cores_waiting   },
        { "two-cores-late",      two_cores_late      },
    };
}
