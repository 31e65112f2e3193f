// Flips and shifts of training images, drawn on the fly.
//
// A draw is a pure function of (seed, epoch, index of the image in the data set): not of ranks, batches,
// timing or where a run was resumed. Evaluation does not augment.
#pragma once

#include <cstdint>

#include "trainer/config/config.h"

namespace gradwire {

struct AugmentDraw {
  bool flip = false;       // left and right change places
  int32_t dy = 0, dx = 0;  // pixel (y, x) of the crop is (y + dy, x + dx) of the image, black outside it
};

// How many pixels of black a crop is taken from around an image: an eighth of its side, rounded up, which
// is 4 for 28 and 32 pixels. What torchvision's RandomCrop(side, padding) does: padding with zeros, before
// normalization, then a window at a uniform offset.
int32_t crop_padding(int32_t side);

AugmentDraw draw_augmentation(const Augmentation& which, uint64_t seed, int64_t epoch, int64_t image,
                              int32_t height, int32_t width);

// One channel of an image, (height, width): to[y][x] = pixel * scale + shift of the crop, which is flipped
// after it was taken. Reads 1 and writes 4 bytes per pixel; no alignment.
void normalize_plane(const uint8_t* pixels, int32_t height, int32_t width, const AugmentDraw& draw,
                     float scale, float shift, float* to);

}  // namespace gradwire
