// Where what a group of nodes uses is for its kernels: in device memory, where it is, or in scratch memory.

#pragma once

#include "device/core.h"
#include "plan/fusion.h"
#include "plan/plan.h"
#include "select/group.h"

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

// Where a group's slots, and then its results, are.
class neuron_placement {
  public:
    // Places them, those in host memory and those that are moved at the beginning of scratch memory, which all groups of a graph use.
    // Returns "", or why a launch would not compute what the nodes do: some are on no memory of the core and its host, or overlap.
    //
    // node  the last one
    std::string place(const neuron_core & core, neuron_locate_t locate, ggml_tensor * node, const neuron_group & group);

    // Places masks that kernels need longer behind what all groups use, from `begin` on, or where one like it is. Returns where they end.
    size_t place_masks(std::vector<neuron_long_mask> & placed, size_t begin);

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
        neuron_operand                     where;  // memory NULL: scratch memory; as large as kernels have it
        neuron_operand                     home;   // memory NULL: host memory
        ggml_tensor *                      tensor = nullptr;  // NULL: an absent source
        size_t                             offset = 0;        // in the tensor
        const neuron_group_slot *          slot   = nullptr;  // NULL of a result
        neuron_blocks                      blocks{};          // that kernels have more rows of
        std::shared_ptr<const neuron_laid> laid{};            // how the kernel has it, where it is laid out
        bool                               lost = false;  // what is written there, since it is a result's memory later

        // Returns whether the host makes it from what the tensor has.
        bool is_made() const {
            return slot && (slot->first || slot->room.named.n > 1 || slot->room.kind == neuron_group_room::WIDER);
        }

        // Has the kernel's tensor in scratch memory.
        void lay_out(const std::shared_ptr<const neuron_laid> & how) {
            laid  = how;
            where = { nullptr, 0, neuron_nbytes(how->kernel) };
        }

        // Returns an address, whatever the memory.
        const char * begin() const { return (const char *) tensor->data + offset; }
    };

    static bool     overlap(const operand & a, const operand & b);
    bool            add(const neuron_core &       core,
                        neuron_locate_t           locate,
                        const neuron_group_slot * slot,
                        ggml_tensor *             t,
                        size_t                    offset,
                        size_t                    size,
                        size_t                    in_kernel);
    bool            add_slot(const neuron_core &       core,
                             neuron_locate_t           locate,
                             const neuron_group_slot & slot,
                             ggml_tensor *             source);
    bool            keep_apart(const neuron_group & group, const ggml_tensor *& changed);
    const operand * shared_with(const neuron_group & group, size_t i) const;
    void            take_scratch(const neuron_group & group);
    void            add_copies(const operand & o, neuron_memory * scratch, neuron_planned & planned) const;

    std::vector<operand>          operands;
    std::vector<neuron_long_mask> masks;  // in the order of their slots
    size_t between[2] = {};               // where what a launch computes for the next one is in scratch memory, in turn
    size_t end        = 0;
};

// A node that has to be computed, or a group of nodes or attention, and what computes it.
struct neuron_candidate {
    int                                 node;             // in cgraph->nodes; the last one
    std::shared_ptr<const neuron_group> known;            // of a node or attention
    neuron_group *                      found = nullptr;  // one of neuron_groups in place of it
    neuron_placement                    placement;

    const neuron_group & group() const { return found ? *found : *known; }
};

// Returns what computes the nodes of a graph that are in no group, and the groups, in the order of the graph.
//
// unmet  as of neuron_find_groups
std::vector<neuron_candidate> neuron_find_candidates(const ggml_cgraph *         cgraph,
                                                     const neuron_kernel_store & kernels,
                                                     neuron_groups &             groups,
                                                     neuron_unmet                unmet);
