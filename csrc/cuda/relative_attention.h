// The interface between the torch side of relative_attention on a GPU and its kernels.
#pragma once

#include "../attention.h"

namespace fastbert::cuda {

// What the distance i - j of query i and key j adds to their score. slots[farthest + distance] is the row of the tables
// for a distance from -farthest to farthest; distances beyond these have the slot of the nearer end. Slots are clamped
// to 0 .. width - 1, so that nothing is read out of bounds.
struct RelativePositions {
  const int32_t* slots;  // [2 farthest + 1], on the device
  int farthest, width;
  const void *keys, *queries;  // [width, H, D] of the call's type, or nullptr
  const float* bias;           // [H, width], or nullptr
};

// Where the gradients of the tables go, each of its table's shape and dtype; nullptr for those that are not wanted.
struct RelativeGradients {
  void *keys, *queries;
  float* bias;

  bool any() const { return keys || queries || bias; }
};

// The size of the backward's scratch memory, in floats.
int64_t relative_attention_room(const Attention& a, const RelativeGradients& gradients);

// Like attention_fwd and attention_bwd. The tables' gradients are written whatever `a` holds. room: scratch memory of
// relative_attention_room() floats, 16-byte aligned.
const char* relative_attention_fwd(const Attention& a, const RelativePositions& positions, void* out, float* lse,
                                   void* stream);
const char* relative_attention_bwd(const Attention& a, const RelativePositions& positions, const void* dout,
                                   const void* out, const float* lse, void* dqkv, const RelativeGradients& gradients,
                                   float* room, void* stream);

}  // namespace fastbert::cuda
