// The graphs of a projector, as lines of an export.

#pragma once

#include "options.h"

// Writes the graphs of the projector that `opts.mmproj` names to standard output.
void export_projector(const options & opts);
