// What most files of the test programs include, compiled once for each program.

#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-impl.h"
#include "ggml.h"

#include <algorithm>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>
