# cmake --install --component library: libgradwire.so, gradwire.h, and the files for find_package(gradwire)
# and pkg-config. GradwireProgram.cmake has the component `program`.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# gradwire_folders(COMPONENT FOLDER...): makes missing folders accessible to all users. install() makes them
# as the umask requires, even with CMAKE_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS.
function(gradwire_folders component)
  install(CODE "set(folders \"${ARGN}\")" CODE [[foreach(path ${folders})
    cmake_path(ABSOLUTE_PATH path BASE_DIRECTORY "${CMAKE_INSTALL_PREFIX}")
    execute_process(COMMAND sh -c "umask 022 && mkdir -p \"$0\"" "$ENV{DESTDIR}${path}")
  endforeach()]] COMPONENT ${component})
endfunction()

# gradwire_pages(COMPONENT PACKAGE): the license, and the pages that messages name, docs/*.md.
function(gradwire_pages component package)
  file(GLOB pages CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/docs/*.md)
  gradwire_folders(${component} ${CMAKE_INSTALL_DATADIR}/doc/${package})
  install(FILES ${PROJECT_SOURCE_DIR}/cmake/copyright ${pages}
    DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${package} COMPONENT ${component})
endfunction()
gradwire_pages(library libgradwire-dev)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/gradwire)
set(pc_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
gradwire_folders(library ${package_dir} ${pc_dir} ${CMAKE_INSTALL_INCLUDEDIR}/gradwire)

install(TARGETS gradwire_shared EXPORT gradwireTargets INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library NAMELINK_COMPONENT library)
install(FILES ${PROJECT_SOURCE_DIR}/include/gradwire/gradwire.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/gradwire COMPONENT library)

# find_package(gradwire): target gradwire::gradwire, the C ABI of gradwire.h. The library contains its
# dependencies or names them (DT_NEEDED), so its users do not have to find any.
install(EXPORT gradwireTargets FILE gradwireConfig.cmake NAMESPACE gradwire:: DESTINATION ${package_dir}
  COMPONENT library)
# Until 1.0 a minor version may change the ABI.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/gradwireConfigVersion.cmake
  VERSION ${PROJECT_VERSION} COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/gradwireConfigVersion.cmake DESTINATION ${package_dir} COMPONENT library)

# The prefix is relative to the file, so an installed tree can be moved.
file(RELATIVE_PATH pc_to_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" pc_to_prefix ${pc_to_prefix})
file(WRITE ${PROJECT_BINARY_DIR}/gradwire.pc
"prefix=\${pcfiledir}/${pc_to_prefix}
libdir=\${prefix}/${CMAKE_INSTALL_LIBDIR}
includedir=\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}

Name: gradwire
Description: Gradient compression for data-parallel training
Version: ${PROJECT_VERSION}
Cflags: -I\${includedir}
Libs: -L\${libdir} -lgradwire
")
install(FILES ${PROJECT_BINARY_DIR}/gradwire.pc DESTINATION ${pc_dir} COMPONENT library)

# cpack: libgradwire-dev_VERSION_ARCHITECTURE.deb and gradwire_VERSION_ARCHITECTURE.deb, the same files below
# /usr (make deb).
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME gradwire)
set(CPACK_PACKAGE_CONTACT "Gradwire's developers")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_COMPONENTS_ALL library program)
set(CPACK_COMPONENT_LIBRARY_DESCRIPTION "gradient compression for data-parallel training: the C library
Averages gradients over the ranks of a training run, over TCP or NCCL, in
8, 4 and fewer bits per element or as low-rank factors, with error feedback:
what one step's encoding loses is sent in a later step.
.
The package contains libgradwire.so, its header gradwire.h, files for CMake's
find_package(gradwire) and pkg-config, and the documentation.")
set(CPACK_COMPONENT_PROGRAM_DESCRIPTION "gradient compression for data-parallel training: the programs
gradwire trains vision transformers on several ranks with compressed
gradients, compares compressions, recommends one for a machine's links
(gradwire doctor) or for a cluster (gradwire plan), and reports on runs.
gradwire-bench measures kernels, wire formats and collective operations.
.
The package contains the programs, their man pages, and the documentation.")
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_NAME libgradwire-dev)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_NAME gradwire)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_RECOMMENDS python3-plotly)  # gradwire report
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${PROJECT_BINARY_DIR}/lib)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CMAKE_SKIP_INSTALL_ALL_DEPENDENCY ON)  # packaged targets are built by name
include(CPack)
