// Bundles as kernelgen writes them for people: a folder with index.json and one file per NEFF.

#pragma once

#include "neuron_kernels.h"

#include <string>

// Opens a tree, or returns NULL and says in `message` what is wrong with it and where. Unlike a pack, which is mapped, a
// tree's NEFFs are read into memory here.
neuron_kernels * neuron_tree_open(const std::string & folder, std::string & message);
