// A device's properties and its memory.

#include "../values.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"
#include "scenario.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

// The artificial ops that decide where llama.cpp puts weights: 512 tokens, for any kernels.
static void probes() {
    context       ctx;
    ggml_tensor * weight = f32(ctx.get(), 32, 6);
    ggml_tensor * input  = f32(ctx.get(), 32, 512);
    ggml_tensor * other  = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_Q2_K, 256, 6);
    ggml_tensor * good   = ggml_mul_mat(ctx.get(), weight, input);
    ggml_tensor * bad    = ggml_mul_mat(ctx.get(), other, f32(ctx.get(), 256, 512));

    check(!ggml_backend_dev_supports_op(neuron, good), "there is a kernel for 512 tokens: this scenario shows nothing");
    ggml_backend_buffer_ptr dummy(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(neuron), 0));
    weight->buffer = other->buffer = dummy.get();
    check(ggml_backend_dev_supports_op(neuron, good), "a probe for a type that there are kernels for is refused");
    check(!ggml_backend_dev_supports_op(neuron, bad), "a probe for a type without kernels is accepted");
    weight->buffer = other->buffer = nullptr;
}

// llama.cpp's probe before it samples on a device: 2^17 candidates, or 2^20 in other versions. The kernels are for 500,
// for the 5 results of a top-k, and for a temperature of 0.5.
static void sampler_probe() {
    for (const int64_t n : { (int64_t) 1 << 17, (int64_t) 1 << 20 }) {
        context                         ctx;
        const std::vector<const char *> names      = { "argmax",        "top-k of 5", "its candidates",      "a bound",
                                                       "a temperature", "top-k of 6", "another temperature", "a sort",
                                                       "of fewer" };
        ggml_tensor *                   logits     = ggml_reshape_1d(ctx.get(), f32(ctx.get(), n), n);
        ggml_tensor *                   candidates = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, n);
        ggml_tensor *                   top        = ggml_top_k(ctx.get(), logits, 5);
        std::vector<ggml_tensor *>      nodes      = {
            ggml_argmax(ctx.get(), logits),
            top,
            ggml_get_rows(ctx.get(), ggml_reshape_2d(ctx.get(), candidates, 1, n), top),
            ggml_clamp(ctx.get(), ggml_sum(ctx.get(), logits), 1.0f, (float) n),
            ggml_scale(ctx.get(), logits, 2.0f),
            ggml_top_k(ctx.get(), logits, 6),
            ggml_scale(ctx.get(), logits, 3.0f),
            ggml_argsort(ctx.get(), logits, GGML_SORT_ORDER_DESC),
            ggml_argmax(ctx.get(), f32(ctx.get(), n - 1)),
        };
        for (size_t i = 0; i < nodes.size(); i++) {
            const bool takes = i < 5;
            check(ggml_backend_dev_supports_op(neuron, nodes[i]) == takes,
                  std::string(names[i]) + (takes ? " is refused" : " is taken"));
        }
    }
}

// What a program that samples on a device does while graphs are recorded: first it calls supports_op for 2^17 and 2^20
// candidates, which occur in no call, then it computes.
static void recorded_samplers() {
    context ctx;
    for (const int64_t n : { (int64_t) 1 << 17, (int64_t) 1 << 20 }) {
        ggml_tensor * logits     = ggml_reshape_1d(ctx.get(), f32(ctx.get(), n), n);
        ggml_tensor * candidates = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, n);
        ggml_tensor * top        = ggml_top_k(ctx.get(), logits, 5);
        for (const ggml_tensor * node :
             { top, ggml_get_rows(ctx.get(), ggml_reshape_2d(ctx.get(), candidates, 1, n), top),
               ggml_scale(ctx.get(), logits, 2.0f) }) {
            check(ggml_backend_dev_supports_op(neuron, node), "a question is refused");
        }
    }
    (void) run(neuron, [](ggml_context * ctx) -> built {
        ggml_tensor * logits = f32(ctx, 500);
        ggml_tensor * rows   = ggml_pad(ctx, logits, 0, 1, 0, 0);
        ggml_tensor * first  = ggml_view_1d(ctx, rows, 500, 0);
        ggml_tensor * top    = ggml_top_k(ctx, first, 5);
        ggml_tensor * left   = ggml_get_rows(ctx, ggml_reshape_2d(ctx, first, 1, 500), top);
        return { ggml_scale(ctx, left, 1.25f), { logits } };
    });
}

// Two models whose embeddings have the same name: the program offers one for gathering rows, and the other only for the
// output.
static void same_names() {
    context                 ctx;
    ggml_backend_ptr        host(ggml_backend_dev_init(cpu, nullptr));
    ggml_backend_buffer_ptr dummy(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(neuron), 0));
    const auto              weight = [&](ggml_type type, int64_t n_embd) {
        ggml_tensor * w = ggml_new_tensor_2d(ctx.get(), type, n_embd, 8);
        ggml_set_name(w, "token_embd.weight");
        return w;
    };
    const auto gather = [&](ggml_tensor * w) {
        return ggml_get_rows(ctx.get(), w, ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 512));
    };
    ggml_tensor * target = weight(GGML_TYPE_F32, 64);
    ggml_tensor * draft  = weight(GGML_TYPE_F16, 32);
    for (ggml_tensor * w : { target, draft }) {
        w->buffer = dummy.get();
    }
    ggml_backend_dev_supports_op(neuron, gather(target));
    ggml_backend_dev_supports_op(neuron, ggml_mul_mat(ctx.get(), draft, f32(ctx.get(), 32, 512)));
    for (ggml_tensor * w : { target, draft }) {
        w->buffer = nullptr;
    }
    context                 weights;
    ggml_tensor *           of_target = ggml_dup_tensor(weights.get(), target);
    ggml_tensor *           of_draft  = ggml_dup_tensor(weights.get(), draft);
    ggml_backend_buffer_ptr buffer    = allocate(weights, host);
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    for (ggml_tensor * w : { of_target, of_draft }) {
        ggml_set_name(w, "token_embd.weight");
    }
    check(ggml_backend_dev_supports_op(neuron, gather(of_target)), "a weight that was offered is refused");
    check(!ggml_backend_dev_supports_op(neuron, gather(of_draft)), "a weight that was not offered is taken");
}

// Writes, reads, copies and sets data, at offsets.
static void memory() {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    context          ctx;
    ggml_tensor *    a = f32(ctx.get(), 100);
    ggml_tensor *    b = f32(ctx.get(), 100);
    ggml_tensor *    c = ggml_view_1d(ctx.get(), b, 40, 20 * sizeof(float));
    ggml_set_name(a, "a");
    ggml_set_name(c, "c");

    ggml_backend_buffer_ptr buffer = allocate(ctx, backend);
    check(ggml_backend_buffer_get_base(buffer.get()) != nullptr, "the base is NULL");
    compare(read(a), std::vector<float>(100, 0.0f));
    const std::vector<float> values = numbers(100, 3);
    ggml_backend_tensor_set(a, values.data(), 0, 400);
    ggml_backend_tensor_copy(a, b);
    compare(read(b), values);
    compare(read(c), { values.begin() + 20, values.begin() + 60 });
    const float one = 1.0f;
    ggml_backend_tensor_set(c, &one, 8, sizeof(one));
    ggml_backend_tensor_memset(c, 0, 16, 12);
    std::vector<float> wanted = values;
    wanted[22]                = 1.0f;
    wanted[24] = wanted[25] = wanted[26] = 0.0f;
    compare(read(b), wanted);
    compare(read(a), values);
}

// Tensors that together exceed the limit of older runtimes for one tensor: 4.5 GiB.
static void large_buffers() {
    context ctx;
    for (int i = 0; i < 3; i++) {
        ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, (int64_t) 3 << 27);
    }
    ggml_backend_ptr        backend(ggml_backend_dev_init(neuron, nullptr));
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
    check(buffer != nullptr, "no memory");
}

// Reports how much of a core's memory is free, and its total.
static void free_memory() {
    size_t free  = 0;
    size_t total = 0;
    ggml_backend_dev_memory(neuron, &free, &total);
    fail(std::to_string(free) + " of " + std::to_string(total) + " bytes");
}

// Requests more memory than there is.
static void too_much() {
    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(neuron);
    ggml_backend_buffer_ptr    buffer(ggml_backend_buft_alloc_buffer(buft, (size_t) 1 << 46));
    check(buffer == nullptr, "64 TiB were allocated");
    against_cpu(add);  // the device still works
}

// A buffer that fits the device and exceeds the runtime's limit for one tensor, and a weight that exceeds this limit.
static void too_large_as_one() {
    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(neuron);
    const size_t               most = ggml_backend_buft_get_max_size(buft);
    check(ggml_backend_buffer_ptr(ggml_backend_buft_alloc_buffer(buft, most)) != nullptr, "the largest was refused");
    check(ggml_backend_buffer_ptr(ggml_backend_buft_alloc_buffer(buft, most + 1)) == nullptr, "a larger was allocated");

    context                 ctx;
    ggml_backend_buffer_ptr dummy(ggml_backend_buft_alloc_buffer(buft, 0));
    for (const bool fits : { true, false }) {
        ggml_tensor * weight = f32(ctx.get(), 32, (int64_t) (most / (32 * sizeof(float))) + (fits ? 0 : 1));
        weight->buffer       = dummy.get();
        ggml_set_name(weight, fits ? "fits" : "does-not-fit");
        ggml_tensor * op = ggml_mul_mat(ctx.get(), weight, f32(ctx.get(), 32, 512));
        check(ggml_backend_dev_supports_op(neuron, op) == fits, "a weight of that size goes to the wrong place");
        weight->buffer = nullptr;
    }
}

// Loads a program, and requests more memory than there is beside the tensors.
static void too_much_beside_programs(size_t size) {
    against_cpu(add);
    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(neuron);
    check(ggml_backend_buffer_ptr(ggml_backend_buft_alloc_buffer(buft, size)) == nullptr, "it was allocated");
    against_cpu(add);
}

// The properties that matter to a program that pipelines NeuronCores.
static void capabilities(bool async) {
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(neuron, &props);
    check(props.caps.async == async && props.caps.events == async, "async and events are not as they should be");
    check(props.caps.host_buffer, "no host buffer");
    const ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(neuron);
    check(type && ggml_backend_buft_is_host(type), "the host buffer type is none");
    const ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(type, 1000));
    check(buffer && ggml_backend_buffer_is_host(buffer.get()), "no memory");
    memset(ggml_backend_buffer_get_base(buffer.get()), 1, 1000);
    const ggml_backend_event_ptr event(ggml_backend_event_new(neuron));
    check((event != nullptr) == async, "events are not as they should be");
}

// A child of the process ends, as a program that starts another one does.
static void forked() {
    against_cpu(add);
    const pid_t child = fork();
    if (child == 0) {
        alarm(30);
        exit(0);
    }
    int status = -1;
    check(waitpid(child, &status, 0) == child && status == 0, "the child did not end");
    against_cpu(add);
}

scenario_table device_scenarios() {
    return {
        { "memory",            memory                                             },
        { "probes",            probes                                             },
        { "sampler-probe",     sampler_probe                                      },
        { "recorded-samplers", recorded_samplers                                  },
        { "same-names",        same_names                                         },
        { "large-buffers",     large_buffers                                      },
        { "free-memory",       free_memory                                        },
        { "forked",            forked                                             },
        { "too-much",          too_much                                           },
        { "too-large",         too_large_as_one                                   },
        { "no-room",           [] { too_much_beside_programs((size_t) 1 << 30); } },
        { "asynchronous",      [] { capabilities(true); }                         },
        { "synchronous",       [] { capabilities(false); }                        },
    };
}
