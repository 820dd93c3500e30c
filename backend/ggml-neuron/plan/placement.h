// Where a group's operands are for its kernels: in device memory, in place, or in scratch memory.

#pragma once

#include "device/core.h"
#include "plan/fusion.h"
#include "plan/plan.h"
#include "select/group.h"

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

// The places of a group's slots, followed by its results.
class neuron_placement {
  public:
    // Places the operands. Operands in host memory, and operands that are moved, go to the beginning of scratch memory,
    // which all groups of a graph use. Returns "", or why a launch would compute something else than the nodes: some
    // operands are neither in the core's memory nor on its host, or overlap.
    //
    // node  the last one
    std::string place(const neuron_core & core, neuron_locate_t locate, ggml_tensor * node, const neuron_group & group);

    // Places masks for kernels with more columns, from `begin` on behind all groups' scratch memory, or at an equal
    // mask. Returns the end.
    size_t place_masks(std::vector<neuron_long_mask> & placed, size_t begin);

    size_t scratch() const { return end; }

    // locked. Binds the group's kernels and plans the copies around them. Returns false on failure: see
    // neuron_core::bind.
    bool bind(neuron_core &        core,
              neuron_fusion &      fusion,
              neuron_memory *      scratch,
              const neuron_group & group,
              neuron_planned &     planned,
              std::string &        message,
              bool &               broken) const;

  private:
    struct operand {
        neuron_operand                     where;             // memory NULL: scratch memory; has the kernel's size
        neuron_operand                     home;              // memory NULL: host memory
        ggml_tensor *                      tensor = nullptr;  // NULL: an absent source
        size_t                             offset = 0;        // in the tensor
        const neuron_group_slot *          slot   = nullptr;  // NULL for a result
        neuron_blocks                      blocks{};          // blocks whose rows are fewer than the kernels'
        // The kernel's layout, if the tensor is laid out for it.
        std::shared_ptr<const neuron_laid> laid{};
        bool lost = false;  // data written here is lost, because it is a result's memory later

        // Returns whether the host makes the operand's data from the tensor's.
        bool is_made() const {
            return slot && (slot->first || slot->room.named.n > 1 || slot->room.kind == neuron_group_room::WIDER);
        }

        // Gives the operand scratch memory of the kernel's size and layout.
        void lay_out(const std::shared_ptr<const neuron_laid> & how) {
            laid  = how;
            where = { nullptr, 0, neuron_nbytes(how->kernel) };
        }

        // Returns the tensor's address, in any memory.
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
    size_t between[2] = {};  // two buffers of scratch memory, used in turn, for data between consecutive launches
    size_t end        = 0;
};

// A node to compute, or a group of nodes or attention, with the kernels for it.
struct neuron_candidate {
    int                                 node;             // in cgraph->nodes; the last one of a group
    std::shared_ptr<const neuron_group> known;            // for a node or attention
    neuron_group *                      found = nullptr;  // otherwise one of neuron_groups
    neuron_placement                    placement;

    const neuron_group & group() const { return found ? *found : *known; }
};

// Returns the graph's groups, and kernels for the nodes outside of groups, in the order of the graph.
//
// unmet  as in neuron_find_groups
std::vector<neuron_candidate> neuron_find_candidates(const ggml_cgraph *         cgraph,
                                                     const neuron_kernel_store & kernels,
                                                     neuron_groups &             groups,
                                                     neuron_unmet                unmet);
