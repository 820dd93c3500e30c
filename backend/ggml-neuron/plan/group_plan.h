// A group of nodes bound to memory: where its slots and results are, and what is copied around its launch.

#pragma once

#include "device/core.h"
#include "plan/fusion.h"
#include "plan/plan.h"
#include "select/groups.h"

#include <cstddef>
#include <string>
#include <vector>

// Where a group's slots, and then its results, are.
class neuron_group_placement {
  public:
    // Places them, those in host memory and those that are moved in scratch memory from `begin` on. Returns false when they are on
    // no memory of the core and its host, or overlap so that a launch would not compute what the nodes do.
    bool place(const neuron_core & core, neuron_locate_t locate, const neuron_group & group, size_t begin);

    size_t scratch() const { return end; }

    // locked. Binds the group's kernels and plans what is copied around them; returns false when that fails: see neuron_core::bind.
    bool bind(neuron_core &        core,
              neuron_fusion &      fusion,
              neuron_memory *      scratch,
              const neuron_group & group,
              neuron_planned &     planned,
              std::string &        message,
              bool &               broken) const;

  private:
    struct operand {
        neuron_operand where;   // memory NULL: scratch memory; as large as the kernel has it
        neuron_operand home;    // memory NULL: host memory
        ggml_tensor *  tensor;
        size_t         offset;  // in the tensor
        bool           written;

        const neuron_group_slot * slot;  // NULL of a result

        // Returns an address, whatever the memory.
        const char * begin() const { return (const char *) tensor->data + offset; }
    };

    static bool overlap(const operand & a, const operand & b);
    bool        add(const neuron_core & core,
                    neuron_locate_t     locate,
                    ggml_tensor *       t,
                    size_t              offset,
                    size_t              size,
                    size_t              in_kernel);
    bool        add_slot(const neuron_core & core, neuron_locate_t locate, const neuron_group_slot & slot);
    void        take_scratch(operand & o);
    void        add_copies(const operand & o, const neuron_operand & bound, neuron_planned & planned) const;
    bool        check_slots() const;
    bool        keep_results_apart(size_t n_slots);

    std::vector<operand> operands;
    size_t               end = 0;
};
